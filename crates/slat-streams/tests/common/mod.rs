//! Runs the seed corpus, and pseudo-random bytes until the time is over.
#![allow(dead_code)]

use slat_model::Rng;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Runs every file of `corpus/NAME`, and then [`random`] bytes.
pub fn soak(name: &str, stream: impl Fn(&[u8])) {
    let run = kept(name, &stream);
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(name);
    let mut files: Vec<PathBuf> = std::fs::read_dir(corpus)
        .into_iter()
        .flatten()
        .map(|entry| entry.expect("a file").path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "the corpus is there");
    for file in &files {
        run(&std::fs::read(file).expect("a file of the corpus"));
    }
    eprintln!("{name}: {} files", files.len());
    random(name, &stream);
}

/// Returns a function that calls `stream`, and keeps the bytes in a file during the call. A finding ends the process.
/// Then the file has the bytes, even if no account can be printed.
fn kept(name: &str, stream: impl Fn(&[u8])) -> impl Fn(&[u8]) {
    let last = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-last"));
    eprintln!("{name}: each input is in {} while it runs", last.display());
    move |bytes: &[u8]| {
        std::fs::write(&last, bytes).expect("the target directory is writable");
        stream(bytes);
    }
}

/// Runs random bytes for `SLAT_STREAMS_SECONDS`, or 12 seconds.
pub fn random(name: &str, stream: impl Fn(&[u8])) {
    let run = kept(name, stream);
    let seconds = std::env::var("SLAT_STREAMS_SECONDS")
        .ok()
        .and_then(|seconds| seconds.parse().ok());
    let seed = std::env::var("SLAT_STREAMS_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let mut rng = Rng::new(seed.unwrap_or(1));
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(12));
    let mut streams = 0;
    while Instant::now() < end {
        let len = 64 << rng.below(7);
        let bytes: Vec<u8> = (0..len).map(|_| rng.below(256) as u8).collect();
        run(&bytes);
        streams += 1;
    }
    eprintln!("{name}: {streams} random streams");
}
