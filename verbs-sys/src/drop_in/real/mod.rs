//! Real devices beside the software one: the system's own library, in a namespace of its own.
//!
//! The drivers of real devices are linked with `libibverbs.so.1`, which is ours in this process. So the system's
//! library is loaded a second time over, with all that it is linked with and its own C library, where nothing of ours
//! is seen: dlmopen(3). Its objects are told from ours by the device that they lead to, and calls with one of them go
//! there. What `verbs.h` calls inline goes there anyway, by the functions in the object.
//!
//! It is not loaded before the kernel knows a device.

mod find;
mod handle;
mod slots;

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub(super) use self::handle::{Handle, context_of};
pub(super) use self::slots::{forget, watch};
use super::calls::set_errno;
use crate::ffi::ibv_device;
use crate::soft::{self, PROVIDER};

/// `1`: no real devices, whatever there is.
const VARIABLE: &str = "VERBS_SOFT_ONLY";

/// The name by which programs ask for the library.
const NAME: &str = "libibverbs.so.1";

/// Where the kernel shows its devices.
const DEVICES: &str = "/sys/class/infiniband";

/// The system's library.
pub(super) struct Real {
    handle: *mut c_void,
    /// Where its C library keeps this thread's `errno`.
    errno: unsafe extern "C" fn() -> *mut c_int,
    /// Readies its C library for a thread that another one has started.
    ready: Option<unsafe extern "C" fn()>,
    /// The one device that is not its own.
    soft: *mut ibv_device,
}

// SAFETY: the fields do not change, the handle is good for any thread, and the device is only compared.
unsafe impl Send for Real {}
// SAFETY: as for Send.
unsafe impl Sync for Real {}

static REAL: OnceLock<Option<Real>> = OnceLock::new();

/// Whether ibv_fork_init(3) was called.
static FORKS: AtomicBool = AtomicBool::new(false);

/// The system's library, if it is loaded.
pub(super) fn loaded() -> Option<&'static Real> {
    REAL.get()?.as_ref()
}

/// The system's library, loaded if the kernel knows a device and the environment has nothing against it.
pub(super) fn load() -> Option<&'static Real> {
    if soft::switch_of(VARIABLE).unwrap_or(false) {
        return None;
    }
    if REAL.get().is_none() && !has_entries(Path::new(DEVICES)) {
        return None;
    }
    let real = REAL.get_or_init(|| {
        let found = find::candidates(&own_path(), NAME);
        let real = found.iter().find_map(|path| match Real::open(path) {
            Ok(real) => {
                tracing::info!(path = %path.display(), "real devices are the system's library's");
                Some(real)
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), error, "cannot use a library for real devices");
                None
            }
        });
        if found.is_empty() {
            tracing::warn!("there are real devices, but no library of the system's for them");
        }
        if FORKS.load(Ordering::Relaxed)
            && let Some(real) = &real
        {
            fork_init_of(real);
        }
        real
    });
    real.as_ref()
}

/// ibv_fork_init(3) of the system's library, now or when it is loaded; `None` while it is not.
pub(super) fn fork_init() -> Option<c_int> {
    FORKS.store(true, Ordering::Relaxed);
    load().map(fork_init_of)
}

fn fork_init_of(real: &Real) -> c_int {
    call!(real, ibv_fork_init() -> c_int)
}

/// The system's library, if this is an object of a device of its.
///
/// # Safety
///
/// As for [`Handle::device`].
#[inline]
pub(super) unsafe fn of(handle: impl Handle) -> Option<&'static Real> {
    let real = loaded()?;
    // SAFETY: by the caller's promise.
    (unsafe { handle.device() } != real.soft).then_some(real)
}

fn has_entries(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
}

/// The file that this code was loaded from.
fn own_path() -> PathBuf {
    // SAFETY: zeros are valid for pointers.
    let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
    let inside: *const c_void = (&raw const REAL).cast();
    // SAFETY: an address, and a place for the result.
    if unsafe { libc::dladdr(inside, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return PathBuf::new();
    }
    // SAFETY: the loader's string, which lasts as long as this code.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes()))
}

/// The one device that is ours. It is never freed.
pub(super) fn soft_device() -> *mut ibv_device {
    // SAFETY: no count is asked for; the list has the one device, and is freed once.
    unsafe {
        let list = (PROVIDER.get_device_list)(ptr::null_mut());
        let device = *list;
        (PROVIDER.free_device_list)(list);
        device
    }
}

/// Tells copies of this library from the system's.
#[unsafe(no_mangle)]
pub extern "C" fn verbs_soft_drop_in() -> c_int {
    1
}

impl Real {
    /// Loads a library into a namespace of its own, for good.
    fn open(path: &Path) -> Result<Self, String> {
        let handle = load_apart(path)?;
        // Copies of ours would look for the system's in turn.
        if symbol(handle, c"verbs_soft_drop_in").is_some() {
            return Err("it is a copy of this one".to_owned());
        }
        symbol(handle, c"ibv_get_device_list").ok_or("it lists no devices")?;
        Self::of(handle)
    }

    fn of(handle: *mut c_void) -> Result<Self, String> {
        let errno = symbol(handle, c"__errno_location").ok_or("it has no errno")?;
        let ready = symbol(handle, c"__ctype_init");
        Ok(Self {
            handle,
            // SAFETY: the C library's function of this name, whose signature this is.
            errno: unsafe {
                transmute::<NonNull<c_void>, unsafe extern "C" fn() -> *mut c_int>(errno)
            },
            // SAFETY: as above.
            ready: ready.map(|ready| unsafe {
                transmute::<NonNull<c_void>, unsafe extern "C" fn()>(ready)
            }),
            soft: soft_device(),
        })
    }

    /// Makes `errno` the library's as long as the result lives, and then the library's the program's.
    pub(super) fn enter(&self) -> Inside<'_> {
        if let Some(ready) = self.ready {
            // SAFETY: it only sets variables of this thread.
            unsafe { ready() };
        }
        let inside = Inside(self);
        // SAFETY: both places are this thread's.
        unsafe { *inside.place() = *libc::__errno_location() };
        inside
    }
}

#[cfg(target_env = "gnu")]
fn load_apart(path: &Path) -> Result<*mut c_void, String> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    let flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
    // SAFETY: a string; the library's constructors expect to be run.
    let handle = unsafe { libc::dlmopen(libc::LM_ID_NEWLM, path.as_ptr(), flags) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: null, or a string that lasts until this thread's next call of the loader.
    let error = unsafe { libc::dlerror().as_ref().map(|error| CStr::from_ptr(error)) };
    Err(error.map_or_else(
        || "it cannot be loaded".to_owned(),
        |error| error.to_string_lossy().into_owned(),
    ))
}

#[cfg(not(target_env = "gnu"))]
fn load_apart(_path: &Path) -> Result<*mut c_void, String> {
    Err("this C library has no namespaces".to_owned())
}

fn symbol(handle: *mut c_void, name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: an open library and a string.
    NonNull::new(unsafe { libc::dlsym(handle, name.as_ptr()) })
}

/// While code of the library runs.
pub(super) struct Inside<'a>(&'a Real);

impl Inside<'_> {
    fn place(&self) -> *mut c_int {
        // SAFETY: the library's C library's function, which takes nothing.
        unsafe { (self.0.errno)() }
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        // SAFETY: the place is this thread's.
        set_errno(unsafe { *self.place() });
    }
}

/// A function of the library, looked up when it is first called.
pub(super) struct Function {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Function {
    /// By a name that ends in a 0.
    pub(super) const fn new(name: &'static str) -> Self {
        let Ok(name) = CStr::from_bytes_with_nul(name.as_bytes()) else {
            panic!("a name in the source that does not end in a 0");
        };
        Self {
            name,
            found: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Where it is; `None` in an old library that does not have it.
    pub(super) fn find(&self, real: &Real) -> Option<NonNull<c_void>> {
        // There is one library for good, so whoever looks finds the same.
        NonNull::new(self.found.load(Ordering::Relaxed)).or_else(|| {
            let found = symbol(real.handle, self.name)?;
            self.found.store(found.as_ptr(), Ordering::Relaxed);
            Some(found)
        })
    }
}

/// What a call gives that an old library does not have.
pub(super) trait Missing {
    fn missing() -> Self;
}

impl Missing for c_int {
    fn missing() -> Self {
        libc::EOPNOTSUPP
    }
}

impl Missing for isize {
    fn missing() -> Self {
        -(libc::EOPNOTSUPP as isize)
    }
}

impl Missing for u64 {
    fn missing() -> Self {
        0
    }
}

impl Missing for () {
    fn missing() {}
}

impl<T> Missing for *mut T {
    fn missing() -> Self {
        set_errno(libc::EOPNOTSUPP);
        ptr::null_mut()
    }
}

impl Missing for *const c_char {
    fn missing() -> Self {
        c"unknown".as_ptr()
    }
}

/// Calls a function of the library, by its name, with its signature.
macro_rules! call {
    ($real:expr, $name:ident($($arg:ident: $type:ty),*) -> $result:ty) => {{
        static FUNCTION: $crate::drop_in::real::Function =
            $crate::drop_in::real::Function::new(concat!(stringify!($name), "\0"));
        let real: &$crate::drop_in::real::Real = $real;
        match FUNCTION.find(real) {
            Some(found) => {
                type Signature = unsafe extern "C" fn($($type),*) -> $result;
                // SAFETY: rdma-core's function of this name, whose signature this is in all its versions.
                let function = unsafe { core::mem::transmute::<core::ptr::NonNull<core::ffi::c_void>, Signature>(found) };
                let _inside = real.enter();
                // SAFETY: the caller's promise to the call of the same name, for objects of the library's.
                unsafe { function($($arg),*) }
            }
            None => <$result as $crate::drop_in::real::Missing>::missing(),
        }
    }};
}

/// Leaves the function with what the library says, if the object is of a device of its.
macro_rules! theirs {
    ($handle:expr, $name:ident($($arg:ident: $type:ty),*) -> $result:ty) => {
        // SAFETY: a live object, by the caller's promise.
        if let Some(real) = unsafe { $crate::drop_in::real::of($handle) } {
            return $crate::drop_in::real::call!(real, $name($($arg: $type),*) -> $result);
        }
    };
}

pub(super) use {call, theirs};

#[cfg(test)]
mod tests;
