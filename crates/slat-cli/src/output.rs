//! The commands' output: to standard output, and to files that are opened before the command's work begins.

use slat_process::file_size::{explained, limited};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Prints `text` on standard output, in one write.
///
/// # Errors
/// A sentence for the user with the system's error, for example about a full disk. If the reader closes the pipe early
/// (`slat info | head -1`), that is no error.
pub fn say(text: &str) -> Result<(), String> {
    let mut output = io::stdout().lock();
    match limited(|| {
        output
            .write_all(text.as_bytes())
            .and_then(|()| output.flush())
    }) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(format!(
            "cannot write to standard output: {}",
            explained(&error)
        )),
        _ => Ok(()),
    }
}

/// Prints `text`, and returns the exit status. For the last step of a command that only prints.
pub fn print(text: &str) -> ExitCode {
    match say(text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            complain(&message);
            ExitCode::FAILURE
        }
    }
}

/// Prints one line on standard error that says why a command failed. If that fails, too, only the exit status tells
/// that the command has failed.
pub fn complain(message: &str) {
    let _ = writeln!(io::stderr(), "slat: {message}");
}

/// A file that keeps its old content until [`write`](Self::write) replaces it.
pub struct Pending {
    path: PathBuf,
    file: File,
    /// Whether this value has created the file and has not written to it yet.
    is_new: bool,
}

impl Pending {
    /// Opens the file at `path` for writing, and creates it if it is missing.
    ///
    /// # Errors
    /// A sentence for the user, which names `path` and a remedy.
    pub fn open(path: &Path) -> Result<Self, String> {
        let create = OpenOptions::new().write(true).create_new(true).open(path);
        let (file, is_new) = match create {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                (OpenOptions::new().write(true).open(path), false)
            }
            created => (created, true),
        };
        match file {
            Ok(file) => Ok(Pending {
                path: path.to_owned(),
                file,
                is_new,
            }),
            Err(error) => Err(format!(
                "cannot write to {}: {error}; {}",
                path.display(),
                remedy(path, error.kind())
            )),
        }
    }

    /// Replaces the file's content.
    ///
    /// # Errors
    /// A sentence for the user, which names the file.
    pub fn write(mut self, content: impl AsRef<[u8]>) -> Result<(), String> {
        self.is_new = false;
        limited(|| self.replace(content.as_ref())).map_err(|error| {
            let why = explained(&error);
            format!("cannot write to {}: {why}", self.path.display())
        })
    }

    fn replace(&mut self, content: &[u8]) -> io::Result<()> {
        // Only a regular file has old content; a pipe or a terminal has none.
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        self.file.write_all(content)
    }
}

impl Drop for Pending {
    /// Removes the file if this value has created it but has not written to it.
    fn drop(&mut self) {
        if self.is_new {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Returns a sentence that tells the user what to do if `path` cannot be opened.
fn remedy(path: &Path, error: ErrorKind) -> String {
    match (error, path.parent()) {
        (ErrorKind::NotFound, Some(parent)) if !parent.as_os_str().is_empty() => {
            format!("create the directory {} first", parent.display())
        }
        (ErrorKind::IsADirectory, _) => "give the name of a file, not of a directory".to_owned(),
        _ => "give another FILE, one that you may write to".to_owned(),
    }
}
