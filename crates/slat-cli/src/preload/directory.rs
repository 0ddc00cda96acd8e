//! Makes a directory in which no other user can replace a file, and whose files all users can read.

use std::fs::{self, DirBuilder, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The mode of the directory, to which only its owner can write.
const MODE: u32 = 0o755;

/// The mode bits that let the file's group write, and all other users.
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;

/// Creates `directory` if it is missing. Returns its path without symbolic links.
///
/// # Errors
/// If another user could write to the directory, or replace it by a different directory.
pub fn create(directory: &Path) -> io::Result<PathBuf> {
    let (Some(parent), Some(name)) = (directory.parent(), directory.file_name()) else {
        return Err(io::Error::other("has no parent directory"));
    };
    if !parent.exists() {
        // A new user may not have a directory ~/.cache yet, so missing parents are created, too.
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(parent)?;
    }
    let parent = fs::canonicalize(parent)?;
    for ancestor in parent.ancestors() {
        keeps_entries(ancestor)?;
    }
    let directory = parent.join(name);
    match DirBuilder::new().mode(MODE).create(&directory) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    // A symbolic link is not followed, because in /tmp any user could have made it.
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(&directory)?;
    let meta = opened.metadata()?;
    if meta.uid() != user() {
        return Err(io::Error::other("belongs to another user"));
    }
    // If other users can write to the directory, one of them may already have a file in it open for writing. So the
    // directory is refused.
    if meta.mode() & (GROUP_WRITES | OTHERS_WRITE) != 0 {
        return Err(io::Error::other("other users may write to it"));
    }
    // The umask may have removed rights that other users need, and old versions of slat made the directory private. So
    // the mode is set again.
    if meta.mode() & MODE != MODE {
        opened.set_permissions(Permissions::from_mode(MODE))?;
    }
    Ok(directory)
}

/// Whether the directories of `file`'s path let every user reach the file. The file's own mode is not checked. The path
/// must not contain symbolic links.
pub fn is_open_to_all(file: &Path) -> bool {
    file.ancestors()
        .skip(1)
        .all(|ancestor| fs::metadata(ancestor).is_ok_and(|meta| meta.mode() & 0o001 != 0))
}

/// Checks that no other user can rename or delete an entry of `directory` that belongs to this user.
fn keeps_entries(directory: &Path) -> io::Result<()> {
    let meta = fs::metadata(directory)?;
    let refuse = |why| {
        let directory = directory.display();
        Err(io::Error::other(format!("{why} {directory}, above it")))
    };
    // Whatever the directory's mode says, its owner can rename and delete entries.
    if !is_trusted(&meta) {
        return refuse("another user owns");
    }
    // In a directory with the sticky bit, as /tmp, only an entry's owner can rename or delete the entry.
    let group_writes = meta.mode() & GROUP_WRITES != 0 && meta.gid() != 0;
    let writable = group_writes || meta.mode() & OTHERS_WRITE != 0;
    if writable && meta.mode() & libc::S_ISVTX == 0 {
        return refuse("other users may write to");
    }
    Ok(())
}

/// Whether a file belongs to this user or to root, who can do everything anyway. In a user namespace, the host's root
/// may have no user number. Then an owner without a number is trusted, because otherwise all system files would be
/// untrusted.
fn is_trusted(meta: &Metadata) -> bool {
    let number = |file| fs::read_to_string(file).ok()?.trim().parse().ok();
    let all_mapped = || {
        let map = fs::read_to_string("/proc/self/uid_map");
        map.is_ok_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]))
    };
    let owner = meta.uid();
    owner == 0
        || owner == user()
        || (number("/proc/sys/kernel/overflowuid") == Some(owner) && !all_mapped())
}

/// Returns the user number that files of this process get as owner.
pub fn user() -> u32 {
    // SAFETY: the call only returns a number.
    unsafe { libc::geteuid() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;
    use crate::preload::tests::scratch;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn a_new_directory_is_open_to_all_and_an_old_private_one_is_opened() {
        let scratch = scratch("open");
        fs::set_permissions(&scratch, Permissions::from_mode(0o755)).unwrap();
        let directory = create(&scratch.join("slat")).unwrap();
        assert_eq!(mode(&directory), 0o755);
        fs::set_permissions(&directory, Permissions::from_mode(0o700)).unwrap();
        assert!(!is_open_to_all(&directory.join("file")));
        create(&directory).unwrap();
        assert_eq!(mode(&directory), 0o755);
        assert!(is_open_to_all(&directory.join("file")));
        fs::set_permissions(&scratch, Permissions::from_mode(0o700)).unwrap();
        assert!(!is_open_to_all(&directory.join("file")));
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn a_symbolic_link_in_place_of_the_directory_is_refused() {
        let scratch = scratch("link");
        let elsewhere = scratch.join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let before = mode(&elsewhere);
        symlink(&elsewhere, scratch.join("slat")).unwrap();
        assert!(create(&scratch.join("slat")).is_err());
        assert_eq!(mode(&elsewhere), before);
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_refused() {
        let scratch = scratch("mode");
        let directory = scratch.join("slat");
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, Permissions::from_mode(0o770)).unwrap();
        assert!(create(&directory).is_err());
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn ancestors_that_another_user_can_change_are_refused() {
        let scratch = scratch("ancestors");
        let directory = scratch.join("a/b/slat");
        fs::create_dir_all(scratch.join("a/b")).unwrap();
        for ancestor in [scratch.join("a/b"), scratch.join("a"), scratch.clone()] {
            let before = fs::metadata(&ancestor).unwrap().permissions();
            for mode in [0o777, 0o757] {
                fs::set_permissions(&ancestor, Permissions::from_mode(mode)).unwrap();
                assert!(create(&directory).is_err(), "{}", ancestor.display());
            }
            fs::set_permissions(&ancestor, Permissions::from_mode(0o1777)).unwrap();
            create(&directory).unwrap();
            fs::set_permissions(&ancestor, before).unwrap();
            // Only root can give a directory to another user, so only root runs this part.
            if chown(&ancestor, Some(1), None).is_ok() {
                let error = create(&directory).unwrap_err().to_string();
                assert!(error.contains("another user owns"), "{error}");
                chown(&ancestor, Some(user()), None).unwrap();
            }
        }
        create(&directory).unwrap();
        fs::remove_dir_all(scratch).unwrap();
    }
}
