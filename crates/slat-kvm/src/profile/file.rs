//! The file of a process, which has an old content or a new one at any time.

use crate::report;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

#[derive(Default)]
pub(super) struct ProfileFile {
    /// `None` before the first content.
    path: Option<PathBuf>,
    /// Whether a failure was reported.
    has_failed: bool,
}

impl ProfileFile {
    /// Gives the file a new content. The first process that has one has a file at `wanted`, others have a dot and their process id
    /// added. The first failure is reported.
    pub(super) fn write(&mut self, wanted: &Path, content: &str) {
        if let Err(error) = self.try_write(wanted, content)
            && !self.has_failed
        {
            self.has_failed = true;
            let path = self.path.as_deref().unwrap_or(wanted);
            report::say(format_args!(
                "the profile {} cannot be written: {error}",
                path.display()
            ));
        }
    }

    fn try_write(&mut self, wanted: &Path, content: &str) -> io::Result<()> {
        let path = match &self.path {
            Some(path) => path,
            None => self.path.insert(claim(wanted)?),
        };
        let new = with_end(path, ".new");
        // What a process that was killed has left.
        let _ = fs::remove_file(&new);
        let written = create(&new)
            .and_then(|mut file| file.write_all(content.as_bytes()))
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

/// Creates a file that nobody else has.
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
            // One of an earlier process with this id.
            let _ = fs::remove_file(&own);
            create(&own).map(|_| own)
        }
        created => created.map(|_| wanted.to_owned()),
    }
}
