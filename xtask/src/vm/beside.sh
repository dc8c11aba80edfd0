#!/bin/bash
# Programs on the kernel's device and on soft0, by the drop-in library, which has both:
# beside.sh LIBRARIES PROGRAM, with the program of beside.c. $VERBS_DEVICE is the kernel's device.
set -euo pipefail
libraries=$1
program=$2
real=$VERBS_DEVICE

fail() {
    echo "FAILED: $*"
    exit 1
}

# What the device says of itself to the system's own library.
want=$(ibv_devinfo -v -d "$real")

export LD_LIBRARY_PATH=$libraries VERBS_SOFT_LOG=info
devices=$(ibv_devices)
echo "$devices"
[[ $devices == *soft0*"$real"* ]] || fail "both devices shall be listed, soft0 first"
[[ $(VERBS_SOFT_ONLY=1 ibv_devices) != *"$real"* ]] || fail "VERBS_SOFT_ONLY=1 shall leave $real out"
! VERBS_SOFT_ONLY=1 ibv_devinfo -d "$real" || fail "VERBS_SOFT_ONLY=1 shall leave $real out"
export VERBS_SOFT_LOG=error
copy=$(mktemp -d)
cp "$libraries/libibverbs.so.1" "$copy"
devices=$(LD_LIBRARY_PATH=$libraries:$copy ibv_devices)
[[ $devices == *"$real"* ]] || fail "a copy of the library was taken for the system's"
export VERBS_SOFT_LOG=warn
[[ $(ibv_devinfo -v -d "$real") == "$want" ]] || fail "$real is not what it is without the library"
ibv_devinfo -d soft0

# Until somebody listens at the programs' port.
listening() {
    until grep -Eq ':4853 0+:0000 0A' /proc/net/tcp /proc/net/tcp6; do
        kill -0 "$1" || fail "the server is gone"
        sleep 0.1
    done
}

pingpong() {
    echo "== ibv_rc_pingpong $*"
    ibv_rc_pingpong "$@" -n 100 -c &
    local server=$!
    listening "$server"
    ibv_rc_pingpong "$@" -n 100 -c 127.0.0.1
    wait "$server"
}

for options in "-d $real -g 1" "-d soft0 -g 0"; do
    # By polling, by events, and by the calls of the extended verbs.
    for more in "" -e -N; do
        # shellcheck disable=SC2086 # options are words
        pingpong $options $more
    done
done

"$program" 2
VERBS_SOFT_ONLY=1 "$program" 1
echo "both devices work beside each other"
