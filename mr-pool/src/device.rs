//! Registered memory of a device.

use std::ptr::NonNull;

use verbs_sys::{AccessFlags, HostMemory, MemoryRegion, ProtectionDomain};

use crate::source::{Registration, Source, SourceError};

/// Memory that the device hands out (peers on this host can map it), registered in one protection
/// domain.
#[derive(Debug)]
pub(crate) struct DeviceSource {
    pub(crate) pd: ProtectionDomain,
    pub(crate) access: AccessFlags,
}

impl Source for DeviceSource {
    fn register(&self, len: usize) -> Result<Box<dyn Registration>, SourceError> {
        let memory = self.pd.context().alloc_memory(len)?;
        if NonNull::new(memory.addr()).is_none() {
            return Err("the device handed out memory at address 0".into());
        }
        let region = self.pd.reg_memory(&memory, self.access)?;
        Ok(Box::new(DeviceRegistration { region, memory }))
    }
}

#[derive(Debug)]
struct DeviceRegistration {
    region: MemoryRegion,
    memory: HostMemory,
}

impl Registration for DeviceRegistration {
    fn addr(&self) -> NonNull<u8> {
        NonNull::new(self.memory.addr()).unwrap_or(NonNull::dangling())
    }

    fn len(&self) -> usize {
        self.memory.len()
    }

    fn lkey(&self) -> u32 {
        self.region.lkey()
    }

    fn rkey(&self) -> u32 {
        self.region.rkey()
    }

    fn deregister(self: Box<Self>) -> Result<(), SourceError> {
        // On failure the region keeps the memory from being freed.
        Ok(self.region.deregister()?)
    }
}
