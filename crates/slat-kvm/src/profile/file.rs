//! The profile file of a process. At any time the file has a complete content: the content before a write, or the
//! content after it.

use slat_process::file_size::{explained, limited};
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

#[derive(Default)]
pub(super) struct ProfileFile {
    /// The path of the file; `None` before the first content.
    path: Option<PathBuf>,
}

impl ProfileFile {
    /// Gives the file a new content. The first process that writes a file writes it at `wanted`. Other processes add a
    /// dot and their process id to this path.
    ///
    /// # Errors
    /// The system's error, after the file's path. The file keeps its old content.
    pub(super) fn write(&mut self, wanted: &Path, content: &str) -> Result<(), String> {
        self.try_write(wanted, content).map_err(|error| {
            let path = self.path.as_deref().unwrap_or(wanted);
            format!("{}: {}", path.display(), explained(&error))
        })
    }

    fn try_write(&mut self, wanted: &Path, content: &str) -> io::Result<()> {
        let path = match &self.path {
            Some(path) => path,
            None => self.path.insert(claim(wanted)?),
        };
        let new = with_end(path, ".new");
        // Another process with this name, which was killed, may have left the file.
        let _ = fs::remove_file(&new);
        let written = create(&new)
            .and_then(|mut file| limited(|| file.write_all(content.as_bytes())))
            .and_then(|()| fs::rename(&new, path));
        written.inspect_err(|_| {
            let _ = fs::remove_file(&new);
        })
    }
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// Creates a file, and fails if one of this name exists.
fn create(path: &Path) -> io::Result<fs::File> {
    (OpenOptions::new().write(true).create_new(true))
        .mode(0o600)
        .open(path)
}

/// Creates this process's file, empty. Returns its path.
fn claim(wanted: &Path) -> io::Result<PathBuf> {
    match create(wanted) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let own = with_end(wanted, &format!(".{}", std::process::id()));
            // Removes the file of an earlier process with this id.
            let _ = fs::remove_file(&own);
            create(&own).map(|_| own)
        }
        created => created.map(|_| wanted.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_its_last_content_and_another_process_another_file() {
        let directory = std::env::temp_dir().join(format!("slat-profile-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let wanted = directory.join("profile");
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        let (mut first, mut second) = (ProfileFile::default(), ProfileFile::default());
        first.write(&wanted, "old and long").unwrap();
        first.write(&wanted, "new").unwrap();
        second.write(&wanted, "other").unwrap();
        let own = with_end(&wanted, &format!(".{}", std::process::id()));
        assert_eq!((read(&wanted), read(&own)), ("new".into(), "other".into()));
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 2);
        // A directory has the name, so it cannot be removed as a file.
        fs::create_dir(with_end(&wanted, ".new")).unwrap();
        let error = first.write(&wanted, "newer").unwrap_err();
        assert!(error.contains("profile: "), "{error}");
        assert_eq!(read(&wanted), "new");
        fs::remove_dir_all(&directory).unwrap();
    }
}
