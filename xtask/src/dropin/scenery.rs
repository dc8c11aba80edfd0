//! Files that the kernel has for each of its devices. Some programs look at them by themselves, where no library can
//! answer. For these the device has such files in a mount namespace, in which the program runs.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

/// What lies below `/sys/class`: the device's network interface is that of the host's own address.
const SYSFS: &str = "infiniband/soft0/device/net/lo";

/// Mounts the folder of the first argument over `/sys/class`, and becomes the program of the others.
const SCRIPT: &str =
    r#"set -e; mount -t overlay -o "lowerdir=$1:/sys/class" soft0 /sys/class; shift; exec "$@""#;

/// The same command behind the scenery, which is kept in a folder. What the command's environment and folder shall be is
/// to be said of what this gives.
pub fn before(command: &Command, folder: &Path) -> Result<Command> {
    let class = folder.join("scenery");
    let device = class.join(SYSFS);
    fs::create_dir_all(&device).with_context(|| format!("cannot make {}", device.display()))?;
    let mut before = Command::new("unshare");
    before
        .args(["--mount", "--propagation", "private"])
        .args(["sh", "-c", SCRIPT, "sh"])
        .arg(class)
        .arg(command.get_program())
        .args(command.get_args());
    Ok(before)
}
