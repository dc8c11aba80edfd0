//! Real devices and the software one in one list: programs on both, by the drop-in library.

use std::time::Duration;

use anyhow::Result;
use xshell::cmd;

use super::guest::Step;
use crate::dist;
use crate::workspace::Workspace;

/// Builds the libraries and a program of our own in C, and says what runs in the guest.
pub fn step(workspace: &Workspace) -> Result<Step> {
    let libraries = dist::build_default(workspace, dist::Kind::Usual)?;
    let sources = workspace.root.join("xtask").join("src").join("vm");
    let source = sources.join("beside.c");
    let program = workspace.target.join("vm").join("beside");
    let sh = &workspace.shell;
    cmd!(
        sh,
        "cc -O2 -Wall -Werror -o {program} {source} -libverbs -lpthread"
    )
    .run()?;
    let script = sources.join("beside.sh");
    let words = [
        "bash".as_ref(),
        script.as_os_str(),
        libraries.as_os_str(),
        program.as_os_str(),
    ];
    Ok(Step {
        name: "beside".into(),
        directory: workspace.root.clone(),
        command: words
            .map(|word| word.to_string_lossy().into_owned())
            .to_vec(),
        limit: Duration::from_secs(10 * 60),
    })
}
