//! The preload library is embedded in this binary and written out before a program starts.
//!
//! It must be a real file: a program may close every descriptor it inherited, and its children load
//! the library by the same path again. And no other user may be able to replace the file, so it is
//! in a directory that only we may write to.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{env, ptr};

/// The library, as cargo built it together with this binary. (Empty under `cargo check`; see
/// build.rs.)
static LIBRARY: &[u8] = include_bytes!(env!("SLAT_PRELOAD_LIBRARY"));

const PREFIX: &str = "libslat_preload-";

/// A library of an older slat that has not been used for this long is removed.
const UNUSED: Duration = Duration::from_secs(7 * 24 * 3600);

/// Writes the library out, unless it exists, and returns its path.
pub fn write_out() -> Result<PathBuf, String> {
    let mut refused = String::new();
    for directory in candidates() {
        match write_to(&directory) {
            Ok(path) => return Ok(path),
            Err(e) => refused.push_str(&format!("\n  {}: {e}", directory.display())),
        }
    }
    Err(format!(
        "found no directory for the preload library (set TMPDIR to a directory that is not mounted noexec):{refused}"
    ))
}

/// Returns the directories to try, the most lasting one first.
fn candidates() -> Vec<PathBuf> {
    // SAFETY: only returns a number.
    let uid = unsafe { libc::geteuid() };
    let from = |name| {
        env::var_os(name)
            .map(PathBuf::from)
            .filter(|p| p.is_absolute())
    };
    // The system's temporary directories are shared: the name tells whose the directory is.
    let own = format!("slat-{uid}");
    [
        from("XDG_CACHE_HOME")
            .or_else(|| from("HOME").map(|home| home.join(".cache")))
            .map(|cache| cache.join("slat")),
        from("XDG_RUNTIME_DIR").map(|run| run.join("slat")),
        from("TMPDIR").map(|tmp| tmp.join(&own)),
        Some(Path::new("/tmp").join(&own)),
        Some(Path::new("/dev/shm").join(&own)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn write_to(directory: &Path) -> io::Result<PathBuf> {
    // LD_PRELOAD is a list separated by colons and spaces, and knows no escapes.
    if directory
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|b| matches!(b, b':' | b' ' | b'\t' | b'\n' | b'$'))
    {
        return Err(io::Error::other(
            "LD_PRELOAD cannot name a path with this character in it",
        ));
    }
    private_directory(directory)?;
    let name = format!("{PREFIX}{:016x}.so", content_hash());
    let path = directory.join(&name);
    match is_our_library(&path) {
        Ok(true) => {}
        Ok(false) | Err(_) => place(directory, &path)?,
    }
    allows_execution(&path)?;
    let file = File::open(&path)?;
    // Only keeps an old library from counting as unused; the file is usable without.
    let _ = file.set_modified(SystemTime::now());
    remove_unused(directory, OsStr::new(&name));
    Ok(path)
}

/// Creates `directory` if it is missing; refuses one that another user could write to.
fn private_directory(directory: &Path) -> io::Result<()> {
    let parent = directory
        .parent()
        .ok_or_else(|| io::Error::other("has no parent directory"))?;
    if !parent.exists() {
        // ~/.cache of a new user.
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    // No symbolic link is followed: in /tmp any user could have made it.
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(directory)?;
    let meta = opened.metadata()?;
    // SAFETY: only returns a number.
    if meta.uid() != unsafe { libc::geteuid() } {
        return Err(io::Error::other("belongs to another user"));
    }
    // A user who could write to it may still hold a file in it open for writing.
    if meta.permissions().mode() & 0o022 != 0 {
        return Err(io::Error::other("other users may write to it"));
    }
    // A user who may write to the parent may rename our directory, unless the sticky bit is set.
    let parent = fs::metadata(parent)?.permissions().mode();
    if parent & 0o002 != 0 && parent & libc::S_ISVTX == 0 {
        return Err(io::Error::other("other users may write to its parent"));
    }
    Ok(())
}

/// Returns a hash that names the library, so that two versions of slat do not replace each other's
/// file. The directory protects against other users, not this hash.
fn content_hash() -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(LIBRARY);
    hasher.finish()
}

fn is_our_library(path: &Path) -> io::Result<bool> {
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)?;
    if file.metadata()?.len() != LIBRARY.len() as u64 {
        return Ok(false);
    }
    let mut content = Vec::with_capacity(LIBRARY.len());
    file.read_to_end(&mut content)?;
    Ok(content == LIBRARY)
}

/// Writes the library under a name of this process and renames it, so that no process ever sees
/// half of it.
fn place(directory: &Path, path: &Path) -> io::Result<()> {
    let temporary = directory.join(format!(".{PREFIX}{}", std::process::id()));
    // A process with this id may have left it when it died here.
    let _ = fs::remove_file(&temporary);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file| file.write_all(LIBRARY))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Checks that the file system is not mounted noexec: the dynamic linker could not map the library
/// as executable.
fn allows_execution(path: &Path) -> io::Result<()> {
    const LENGTH: usize = 4096;
    let file = File::open(path)?;
    // SAFETY: a new private mapping at an address of the kernel's choice, of a file that is open.
    let mapped = unsafe {
        libc::mmap(
            ptr::null_mut(),
            LENGTH,
            libc::PROT_READ | libc::PROT_EXEC,
            libc::MAP_PRIVATE,
            file.as_raw_fd(),
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping made above, to which no pointer is left.
    unsafe { libc::munmap(mapped, LENGTH) };
    Ok(())
}

fn remove_unused(directory: &Path, current: &OsStr) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_library = name.as_bytes().starts_with(PREFIX.as_bytes());
        let unused = || {
            let modified = entry.metadata().and_then(|m| m.modified()).ok()?;
            Some(modified.elapsed().ok()? > UNUSED)
        };
        if is_library && name != current && unused() == Some(true) {
            // Another slat may have removed it.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Returns the value of LD_PRELOAD with `library` first. The user's entries stay; a slat library
/// that is present already (a `slat run` inside another) is replaced by this one.
pub fn ld_preload(library: &Path, present: Option<OsString>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    let present = present.unwrap_or_default();
    for entry in present.as_bytes().split(|b| matches!(b, b':' | b' ')) {
        let name = entry.rsplit(|&b| b == b'/').next().unwrap_or_default();
        if !entry.is_empty() && !name.starts_with(PREFIX.as_bytes()) {
            value.push(":");
            value.push(OsStr::from_bytes(entry));
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let directory = env::temp_dir().join(format!("slat-test-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        directory
    }

    #[test]
    fn the_embedded_library_is_a_shared_object() {
        assert!(LIBRARY.starts_with(b"\x7fELF"));
    }

    #[test]
    fn a_library_that_was_changed_is_replaced() {
        let scratch = scratch("changed");
        let directory = scratch.join("slat");
        let path = write_to(&directory).unwrap();
        assert_eq!(fs::read(&path).unwrap(), LIBRARY);
        assert_eq!(
            fs::metadata(&directory).unwrap().permissions().mode() & 0o777,
            0o700
        );
        fs::write(&path, b"something else").unwrap();
        assert_eq!(write_to(&directory).unwrap(), path);
        assert_eq!(fs::read(&path).unwrap(), LIBRARY);
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn a_symbolic_link_in_place_of_the_directory_is_refused() {
        let scratch = scratch("link");
        fs::create_dir(scratch.join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(scratch.join("elsewhere"), scratch.join("slat")).unwrap();
        assert!(write_to(&scratch.join("slat")).is_err());
        assert_eq!(fs::read_dir(scratch.join("elsewhere")).unwrap().count(), 0);
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_refused() {
        let scratch = scratch("mode");
        let directory = scratch.join("slat");
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, Permissions::from_mode(0o770)).unwrap();
        assert!(write_to(&directory).is_err());
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn a_parent_that_everybody_may_write_to_is_refused() {
        let scratch = scratch("parent");
        fs::set_permissions(&scratch, Permissions::from_mode(0o777)).unwrap();
        assert!(write_to(&scratch.join("slat")).is_err());
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn a_path_that_ld_preload_cannot_name_is_refused() {
        let scratch = scratch("with space");
        assert!(write_to(&scratch.join("slat")).is_err());
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn entries_of_the_user_stay_in_ld_preload_behind_ours() {
        let ours = Path::new("/run/slat/libslat_preload-1.so");
        assert_eq!(ld_preload(ours, None), ours.as_os_str());
        assert_eq!(
            ld_preload(ours, Some("/a.so b.so:/x/libslat_preload-0.so".into())),
            "/run/slat/libslat_preload-1.so:/a.so:b.so"
        );
    }
}
