//! A stock kernel: downloaded from Debian and unpacked beside the build output, never installed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

/// An unpacked kernel. Its modules lie beside it, where the launcher looks for them.
pub struct Kernel {
    /// The name of its Debian package.
    pub name: String,
    /// The bootable image.
    pub image: PathBuf,
}

/// Unpacks the newest kernel there is for this Debian release, unless it is there already.
///
/// Without a package index (no network) the newest kernel unpacked before serves.
pub fn unpack(sh: &Shell, folder: &Path) -> Result<Kernel> {
    let folder = folder.join("kernels");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let name = match newest_available(sh) {
        Ok(name) => name,
        Err(error) => match newest_unpacked(&folder)? {
            Some(name) => {
                eprintln!("using {name}, unpacked before: {error:#}");
                name
            }
            None => return Err(error.context("find a kernel; try: apt-get update")),
        },
    };
    let root = folder.join(&name);
    if !root.exists() {
        // Renamed when complete, so that an interrupted run leaves nothing that looks whole.
        let partial = folder.join("partial");
        sh.remove_path(&partial)?;
        download(sh, &name, &partial)?;
        fs::rename(&partial, &root)
            .with_context(|| format!("rename {} to {}", partial.display(), root.display()))?;
    }
    let image = only_entry(&root.join("boot"), "vmlinuz-")?;
    Ok(Kernel { name, image })
}

/// Asks the meta-package of Debian's kernels what it now stands for.
fn newest_available(sh: &Shell) -> Result<String> {
    let answer = cmd!(sh, "apt-cache depends --important linux-image-amd64")
        .quiet()
        .ignore_stderr()
        .read()?;
    dependency(&answer).context("the package index knows no linux-image-amd64")
}

/// Finds the kernel in what `apt-cache depends` says of the meta-package.
fn dependency(answer: &str) -> Option<String> {
    answer
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with("linux-image-"))
        .map(str::to_owned)
}

fn newest_unpacked(folder: &Path) -> Result<Option<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with("linux-image-") {
            names.push(name);
        }
    }
    Ok(names.into_iter().max_by_key(|name| version(name)))
}

/// The numbers in a package's name, which order its versions.
fn version(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

fn download(sh: &Shell, name: &str, root: &Path) -> Result<()> {
    let archive = root.join("archive");
    sh.create_dir(&archive)?;
    {
        let _there = sh.push_dir(&archive);
        // The name after the option: without a sandbox user, apt may write here when run as root.
        cmd!(
            sh,
            "apt-get --option APT::Sandbox::User=root --option Acquire::Retries=5 download {name}"
        )
        .run()
        .with_context(|| format!("download {name}; if it is gone: apt-get update"))?;
    }
    let deb = only_entry(&archive, "linux-image-")?;
    cmd!(sh, "dpkg --extract {deb} {root}").run()?;
    sh.remove_path(&archive)?;

    // The archive has no module index; the machine's own tool makes it.
    let modules = ["lib/modules", "usr/lib/modules"]
        .map(|place| root.join(place))
        .into_iter()
        .find(|place| place.exists())
        .with_context(|| format!("{name} has no modules"))?;
    let release = only_entry(&modules, "")?;
    let release = release.file_name().context("modules without a release")?;
    let depmod = if Path::new("/usr/sbin/depmod").exists() {
        "/usr/sbin/depmod"
    } else {
        "/sbin/depmod"
    };
    cmd!(sh, "{depmod} --all --basedir {root} {release}").run()?;
    Ok(())
}

/// The one entry of `folder` whose name starts with `prefix`.
fn only_entry(folder: &Path, prefix: &str) -> Result<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            found.push(entry.path());
        }
    }
    match <[PathBuf; 1]>::try_from(found) {
        Ok([path]) => Ok(path),
        Err(found) => bail!(
            "{} has {} entries named {prefix}*, not one; remove {} to unpack it again",
            folder.display(),
            found.len(),
            folder.parent().unwrap_or(folder).display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_meta_package_names_the_kernel() {
        let answer = "linux-image-amd64\n  Depends: linux-image-6.1.0-57-amd64\n";
        assert_eq!(
            dependency(answer).as_deref(),
            Some("linux-image-6.1.0-57-amd64")
        );
        assert_eq!(dependency("N: Unable to locate package\n"), None);
    }

    #[test]
    fn versions_order_by_number() {
        assert!(version("linux-image-6.1.0-100-amd64") > version("linux-image-6.1.0-57-amd64"));
        assert!(version("linux-image-6.12.1-1-amd64") > version("linux-image-6.1.0-57-amd64"));
    }
}
