//! Loads programs that cannot preload this library: statically linked programs, and programs with another C library,
//! whose dynamic linker could not load it.
//!
//! This library is also an executable program. The kernel starts it instead of PROGRAM, with slat's C library and
//! nothing else. Then this library loads PROGRAM into the same process, as the kernel would. From then on the program's
//! system calls are dispatched ([`dispatch`]). The environment variable `SLAT_PROGRAM` names PROGRAM; the arguments are
//! those of PROGRAM.
//!
//! | file | idea |
//! |---|---|
//! | `image` | the program in memory |

mod image;

use crate::arch::start;
use crate::loaded::{self, PROGRAM};
use crate::real::{Opened, kernel};
use crate::{carry, dispatch, program_break};
use image::Image;
use slat_process::{page_size, pointers};
use std::ffi::{CStr, c_char};
use std::fmt::Display;

/// Ends the process with a message and the exit status that a shell uses if it cannot run a program.
fn refuse(program: &CStr, why: impl Display) -> ! {
    slat_kvm::messages::say(format_args!("{}: {why}", program.to_string_lossy()));
    std::process::exit(126)
}

/// The data that the kernel has put on the stack of a new process (System V ABI, "Process Initialization").
struct Begun {
    /// The address of `argc`. The array of arguments follows, and ends with a null.
    arguments: usize,
    /// The array of environment variables, which ends with a null.
    environment: *const *const c_char,
    /// The auxiliary vector: pairs of a type and a value, up to `AT_NULL`.
    auxiliary: *mut [usize; 2],
}

impl Begun {
    /// Finds the parts of the data above `sp`.
    ///
    /// # Safety
    /// - `sp` is the stack pointer of a new process.
    unsafe fn at(sp: *mut usize) -> Self {
        // SAFETY: `sp` is the stack pointer of a new process, as this function's contract requires.
        unsafe {
            let arguments = *sp;
            let environment = sp.add(arguments + 2);
            let mut end = environment;
            while *end != 0 {
                end = end.add(1);
            }
            Begun {
                arguments,
                environment: environment.cast(),
                auxiliary: end.add(1).cast(),
            }
        }
    }

    /// Returns a pointer to the value of type `kind` in the auxiliary vector.
    unsafe fn value(&self, kind: u64) -> Option<*mut usize> {
        let mut entry = self.auxiliary;
        // SAFETY: the vector ends with `AT_NULL`.
        unsafe {
            loop {
                match (*entry)[0] as u64 {
                    libc::AT_NULL => return None,
                    found if found == kind => return Some(&raw mut (*entry)[1]),
                    _ => entry = entry.add(1),
                }
            }
        }
    }

    /// Returns the value of an environment variable.
    unsafe fn variable(&self, name: &CStr) -> Option<&'static CStr> {
        let mut entry = self.environment;
        // SAFETY: the environment is an array of strings that ends with null.
        unsafe {
            while !(*entry).is_null() {
                let rest = CStr::from_ptr(*entry)
                    .to_bytes_with_nul()
                    .strip_prefix(name.to_bytes());
                if let Some(value) = rest.and_then(|rest| rest.strip_prefix(b"=")) {
                    return CStr::from_bytes_with_nul(value).ok();
                }
                entry = entry.add(1);
            }
        }
        None
    }
}

/// Loads the program and begins to run it.
///
/// # Safety
/// - `sp` is the stack pointer with which the kernel has begun this process, and nothing has used the memory above it.
unsafe extern "C" fn become_program(sp: *mut usize) -> ! {
    // SAFETY: `sp` is the stack pointer with which the kernel has begun this process, as this function's contract
    // requires. The kernel's strings do not move.
    let (begun, library) = unsafe {
        let begun = Begun::at(sp);
        let library = begun
            .value(libc::AT_EXECFN)
            .map(|name| CStr::from_ptr(*name as *const c_char));
        (begun, library.unwrap_or(c"slat"))
    };
    // SAFETY: the kernel's array of variables ends with null.
    let path = match unsafe { begun.variable(PROGRAM) } {
        Some(path) => path,
        None => refuse(
            library,
            "is slat's library: start programs by `slat run -- PROGRAM`",
        ),
    };
    if begun.arguments == 0 {
        refuse(path, "is started without a name for it (argv[0])");
    }
    crate::start();
    carry::take_directory();
    // If the library was started by a descriptor (see `carry`), its file has no path.
    crate::children::set_library(if carry::is_kept() { c"" } else { library });
    if !pointers::can_be_separate() {
        refuse(
            path,
            "loads no libraries; to reach it all the same, slat needs the instructions FSGSBASE, which this processor or kernel does not have",
        );
    }
    let image = match Image::load(path) {
        Ok(image) => image,
        Err(why) => refuse(path, why),
    };
    program_break::begin_at(image.end);
    loaded::set(image.file);
    if let Err(why) = dispatch::arm(image.texts.as_deref()) {
        refuse(
            path,
            format_args!(
                "loads no libraries, and its system calls cannot be dispatched to slat: {why}"
            ),
        );
    }
    // SAFETY: the kernel has set these values for this library. This code changes them to the loaded program's values.
    unsafe {
        for (kind, value) in [
            (libc::AT_PHDR, image.headers),
            (libc::AT_PHNUM, image.count),
            (libc::AT_ENTRY, image.entry),
            (libc::AT_BASE, image.interpreter_base),
            (libc::AT_EXECFN, path.as_ptr() as usize),
        ] {
            if let Some(place) = begun.value(kind) {
                *place = value;
            }
        }
        if image.needs_executable_stack {
            let access = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
            let page = sp as usize & !(page_size() - 1);
            let _ = kernel!(
                libc::SYS_mprotect,
                page,
                page_size(),
                access | libc::PROT_GROWSDOWN
            );
        }
        let name = path.to_bytes_with_nul();
        let start = name
            .iter()
            .rposition(|byte| *byte == b'/')
            .map_or(0, |at| at + 1);
        let _ = kernel!(libc::SYS_prctl, libc::PR_SET_NAME, name[start..].as_ptr());
        pointers::separate(0);
        start::enter(sp, image.start)
    }
}

/// The entry point of this library as a program.
///
/// # Safety
/// - The dynamic linker calls this function.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn slat_begin() -> ! {
    start::begin!(become_program)
}

/// The path of the dynamic linker, with its NUL.
#[cfg(not(test))]
const LINKER: &[u8] = crate::arch::files::LINKER.to_bytes_with_nul();

/// The path of the dynamic linker for the case that this library is started as a program (`PT_INTERP`).
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".interp")]
static INTERPRETER: [u8; LINKER.len()] = *LINKER.first_chunk().unwrap();

/// Opens a program's file.
fn open(path: &CStr) -> Result<Opened, String> {
    Opened::new(path, libc::O_RDONLY).ok_or_else(|| "cannot be opened".to_owned())
}
