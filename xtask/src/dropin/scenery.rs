//! Files that the kernel has for each of its devices. Some programs look at them by themselves, where no library can
//! answer. For these the device has such files in a mount namespace, in which the program runs.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

/// Puts files over `/sys/class` and `/dev`, by way of the empty folder that is the first argument, and becomes the
/// program of the others.
///
/// In sysfs there is the device's network interface, that of the host's own address. Below `/dev/infiniband` is the
/// device, which nobody opens: it has to be a character device. What else is mounted below `/dev` is hidden, but for
/// the place of shared memory.
const SCRIPT: &str = r#"
set -e
mount -t tmpfs scenery "$1"
mkdir -p "$1/class/infiniband/soft0/device/net/lo" "$1/dev/infiniband" "$1/shm"
ln -s /dev/null "$1/dev/infiniband/soft0"
mount --bind /dev/shm "$1/shm"
mount -t overlay -o "lowerdir=$1/class:/sys/class" scenery /sys/class
mount -t overlay -o "lowerdir=$1/dev:/dev" scenery /dev
mount --move "$1/shm" /dev/shm
shift
exec "$@"
"#;

/// The same command behind the scenery, which is mounted in a folder. What the command's environment and folder shall
/// be is to be said of what this gives.
pub fn before(command: &Command, folder: &Path) -> Result<Command> {
    let mounted = folder.join("scenery");
    fs::create_dir_all(&mounted).with_context(|| format!("cannot make {}", mounted.display()))?;
    let mut before = Command::new("unshare");
    before
        .args(["--mount", "--propagation", "private"])
        .args(["sh", "-c", SCRIPT, "sh"])
        .arg(mounted)
        .arg(command.get_program())
        .args(command.get_args());
    Ok(before)
}
