//! The profile file of a process. At any time the file is complete: it has the whole old content or the whole new
//! content.

use slat_process::file_size::{explained, limited};
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

#[derive(Default)]
pub(super) struct ProfileFile {
    /// The path of the file; `None` until the file is first written.
    path: Option<PathBuf>,
}

impl ProfileFile {
    /// Replaces the content of the file. The first process that writes a profile uses the path `wanted`. Other
    /// processes append a dot and their process id to this path.
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
        // A process with the same path may have been killed during a write, and may have left this file.
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

/// Creates a file. Fails if a file of this name exists.
fn create(path: &Path) -> io::Result<fs::File> {
    (OpenOptions::new().write(true).create_new(true))
        .mode(0o600)
        .open(path)
}

/// Creates this process's profile file, empty. Returns the file's path.
fn claim(wanted: &Path) -> io::Result<PathBuf> {
    match create(wanted) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let own = with_end(wanted, &format!(".{}", std::process::id()));
            // An earlier process with the same id may have left this file.
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
        // A directory at this path stops the next write: the process cannot remove it as a file.
        fs::create_dir(with_end(&wanted, ".new")).unwrap();
        let error = first.write(&wanted, "newer").unwrap_err();
        assert!(error.contains("profile: "), "{error}");
        assert_eq!(read(&wanted), "new");
        fs::remove_dir_all(&directory).unwrap();
    }
}
