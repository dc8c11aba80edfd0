//! Hosts for a test: network namespaces with cables between them.

use anyhow::{Context, Result};
use xshell::cmd;

use crate::workspace::Workspace;

/// Network namespaces, two and two at the ends of a pair of virtual interfaces. They go when this does.
pub struct Hosts<'a> {
    workspace: &'a Workspace,
    names: Vec<String>,
}

impl<'a> Hosts<'a> {
    /// Makes two hosts with a cable between them; that takes root, and the program `ip` of iproute2.
    pub fn new(workspace: &'a Workspace) -> Result<Self> {
        Self::with(workspace, &["a", "b"])
    }

    /// Makes two hosts whose cables end at one more host each, which has the address of the other
    /// host: what is to go from one to the other, somebody there has to pass on. In this order: the
    /// first host, what it takes for the second, what the second takes for the first, and the second.
    pub fn with_middle(workspace: &'a Workspace) -> Result<Self> {
        Self::with(workspace, &["c", "cm", "md", "d"])
    }

    fn with(workspace: &'a Workspace, ends: &[&str]) -> Result<Self> {
        let id = std::process::id();
        let names = ends.iter().map(|end| format!("verbs-{id}-{end}"));
        let hosts = Self {
            workspace,
            names: names.collect(),
        };
        for pair in hosts.names.chunks_exact(2) {
            hosts.connect(pair).context(
                "cannot make network namespaces; this needs root and the program `ip` of iproute2",
            )?;
        }
        Ok(hosts)
    }

    fn connect(&self, pair: &[String]) -> Result<()> {
        let sh = &self.workspace.shell;
        for name in pair {
            cmd!(sh, "ip netns add {name}").quiet().run()?;
            cmd!(sh, "ip -n {name} link set lo up").quiet().run()?;
        }
        let [first, second] = pair else {
            return Ok(());
        };
        cmd!(
            sh,
            "ip link add cable netns {first} type veth peer name cable netns {second}"
        )
        .quiet()
        .run()?;
        for (name, address) in pair.iter().zip(Self::ADDRESSES) {
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

    /// The name of the second of two.
    pub fn second(&self) -> &str {
        &self.names[1]
    }

    /// All names.
    pub fn names(&self) -> &[String] {
        &self.names
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
