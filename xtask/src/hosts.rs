//! Two hosts for a test: network namespaces with a cable between them.

use anyhow::{Context, Result};
use xshell::cmd;

use crate::workspace::Workspace;

/// Two namespaces, each at one end of a pair of virtual interfaces. They go when this does.
pub struct Hosts<'a> {
    workspace: &'a Workspace,
    names: [String; 2],
}

impl<'a> Hosts<'a> {
    /// Makes them; that takes root, and the program `ip` of iproute2.
    pub fn new(workspace: &'a Workspace) -> Result<Self> {
        let id = std::process::id();
        let hosts = Self {
            workspace,
            names: [format!("verbs-{id}-a"), format!("verbs-{id}-b")],
        };
        hosts.connect().context(
            "cannot make network namespaces; this needs root and the program `ip` of iproute2",
        )?;
        Ok(hosts)
    }

    fn connect(&self) -> Result<()> {
        let sh = &self.workspace.shell;
        let [first, second] = &self.names;
        for name in &self.names {
            cmd!(sh, "ip netns add {name}").quiet().run()?;
            cmd!(sh, "ip -n {name} link set lo up").quiet().run()?;
        }
        cmd!(
            sh,
            "ip link add cable netns {first} type veth peer name cable netns {second}"
        )
        .quiet()
        .run()?;
        for (name, address) in self.names.iter().zip(Self::ADDRESSES) {
            cmd!(sh, "ip -n {name} address add {address}/24 dev cable")
                .quiet()
                .run()?;
            cmd!(sh, "ip -n {name} link set cable up").quiet().run()?;
        }
        Ok(())
    }

    /// Where they are for each other; the addresses are of a range for examples, RFC 5737.
    pub const ADDRESSES: [&'static str; 2] = ["192.0.2.1", "192.0.2.2"];

    /// The name of the first, as `ip netns` knows it.
    pub fn first(&self) -> &str {
        &self.names[0]
    }

    /// The name of the second.
    pub fn second(&self) -> &str {
        &self.names[1]
    }
}

impl Drop for Hosts<'_> {
    fn drop(&mut self) {
        let sh = &self.workspace.shell;
        for name in &self.names {
            // The interfaces go with them.
            let _ = cmd!(sh, "ip netns delete {name}")
                .quiet()
                .ignore_stderr()
                .run();
        }
    }
}
