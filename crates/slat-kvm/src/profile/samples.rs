//! Samples that vCPUs have taken and that the profile's thread has not counted yet. The memory for samples is allocated
//! once, so that a vCPU that takes a sample allocates nothing.

/// The place where a sample was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Origin {
    /// The number of the VM.
    pub(crate) vm: u64,
    /// The id of the vCPU.
    pub(crate) vcpu: u32,
    /// Whether a nested guest ran.
    pub(crate) is_nested: bool,
}

/// The number of words for all samples. One vCPU fills these words in several seconds.
const WORDS: usize = 1 << 17;
/// The number of words that a sample needs besides its stack.
const HEADER: usize = 3;

pub(super) struct Samples {
    words: Vec<u64>,
    /// The number of samples that were dropped, because there was no space for them.
    pub(super) lost: u64,
}

impl Default for Samples {
    fn default() -> Self {
        Samples {
            words: Vec::with_capacity(WORDS),
            lost: 0,
        }
    }
}

impl Samples {
    pub(super) fn push(&mut self, origin: Origin, stack: &[u64]) {
        if self.words.len() + HEADER + stack.len() > WORDS {
            self.lost += 1;
            return;
        }
        let vcpu = u64::from(origin.vcpu) << 1 | u64::from(origin.is_nested);
        (self.words).extend_from_slice(&[origin.vm, vcpu, stack.len() as u64]);
        self.words.extend_from_slice(stack);
    }

    /// Whether the space is so full that the samples have to be counted soon.
    pub(super) fn are_many(&self) -> bool {
        self.words.len() > WORDS / 2
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Origin, &[u64])> {
        let mut rest = &self.words[..];
        std::iter::from_fn(move || {
            let (&[vm, vcpu, len], after) = rest.split_first_chunk()?;
            let (stack, after) = after.split_at_checked(len as usize)?;
            rest = after;
            let origin = Origin {
                vm,
                vcpu: (vcpu >> 1) as u32,
                is_nested: vcpu & 1 != 0,
            };
            Some((origin, stack))
        })
    }

    pub(super) fn clear(&mut self) {
        self.words.clear();
        self.lost = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_as_they_were_pushed() {
        let mut samples = Samples::default();
        let first = Origin {
            vm: 3,
            vcpu: u32::MAX,
            is_nested: false,
        };
        let second = Origin {
            is_nested: true,
            ..first
        };
        samples.push(first, &[1, 2, 3]);
        samples.push(second, &[4]);
        let read: Vec<_> = samples.iter().collect();
        assert_eq!(read, [(first, &[1, 2, 3][..]), (second, &[4])]);
        samples.clear();
        assert_eq!(samples.iter().count(), 0);
    }

    #[test]
    fn memory_does_not_grow() {
        let mut samples = Samples::default();
        let origin = Origin {
            vm: 0,
            vcpu: 0,
            is_nested: false,
        };
        let (capacity, pushed) = (samples.words.capacity(), WORDS / (HEADER + 5));
        (0..pushed + 7).for_each(|_| samples.push(origin, &[9; 5]));
        assert!(samples.are_many());
        assert_eq!((samples.iter().count(), samples.lost), (pushed, 7));
        assert_eq!(samples.words.capacity(), capacity);
    }
}
