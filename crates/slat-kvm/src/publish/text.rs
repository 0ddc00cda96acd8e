//! Answers questions. Questions and answers are lines of words. A reader sends one line, and gets one answer.
//!
//! ```text
//! slat 1                       the version of this text
//! names memory pf_taken …      the names of the values in lines of that kind
//! …                            what the question asks for: modules `stat` and `map`
//! end                          the answer is whole
//! ```

use super::socket::Own;
use super::writer::{VERSION, Writer};
use super::{debug, map, stat};
use std::fmt::{self, Write as _};

/// Answers the question of the reader at the socket `asked`. An unknown question gets no answer.
pub(super) fn answer(asked: Own) {
    let mut question = [0; 64];
    let question = std::str::from_utf8(asked.receive(&mut question));
    let Some(line) = question.ok().and_then(|text| text.strip_suffix('\n')) else {
        return;
    };
    let mut words = line.split(' ');
    let to = &mut Writer::new(&asked);
    // An error means that the reader has closed the socket. Then the reader needs no answer, so the error is ignored.
    let _ = match words.next() {
        Some(stat::STAT) => whole(to, stat::answer),
        Some(map::MAP) => match map::Question::parse(words) {
            Some(question) => whole(to, |to| map::answer(to, &question)),
            None => Ok(()),
        },
        Some(debug::DEBUG) => {
            debug::begin(asked, words);
            return;
        }
        _ => Ok(()),
    };
}

/// Writes an answer: the first line, the text that `part` writes, and the last line.
fn whole<'a>(
    to: &mut Writer<'a>,
    part: impl FnOnce(&mut Writer<'a>) -> fmt::Result,
) -> fmt::Result {
    writeln!(to, "slat {VERSION}")?;
    part(to)?;
    to.write_str("end\n")?;
    to.finish()
}
