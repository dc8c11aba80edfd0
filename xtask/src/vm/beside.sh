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

# What rdma-core's tests of the control path come to on the device, one a line.
folder=$(mktemp -d)
cp -r /usr/share/doc/rdma-core/tests "$folder"
find "$folder" -name '*.gz' -exec gunzip {} +
tests() {
    # The status says whether all passed, which not all do.
    (cd "$folder" && python3 -W ignore tests/run_tests.py -v --dev "$real" --gid 1 \
        tests.test_{addr,cq,cq_events,cqex,device,fork,mr,pd,qp} 2>&1 || true) | grep ' \.\.\. '
}

# Without the library.
want=$(ibv_devinfo -v -d "$real")
want_of_tests=$(tests)
grep -q 'ok$' <<<"$want_of_tests" || fail "no test passes on $real"

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
diff - <(tests) <<<"$want_of_tests" || fail "tests come to something else than without the library"
echo "$(wc -l <<<"$want_of_tests") tests come to the same, $(grep -c 'ok$' <<<"$want_of_tests") of them to a success"

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
