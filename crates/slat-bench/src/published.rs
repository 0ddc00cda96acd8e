//! The numbers that the references close with, as data.

/// A published result of one case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Published {
    /// As in [`crate::report::Row`].
    pub experiment: &'static str,
    /// As there.
    pub case: &'static str,
    /// As there.
    pub metric: &'static str,
    /// In the metric's unit; `None` where only the change was published.
    pub before: Option<f64>,
    /// The same.
    pub after: Option<f64>,
    /// The relative change: −0.73 is 73 % less.
    pub change: f64,
}

const fn numbers(
    experiment: &'static str,
    case: &'static str,
    metric: &'static str,
    before: f64,
    after: f64,
) -> Published {
    Published {
        experiment,
        case,
        metric,
        before: Some(before),
        after: Some(after),
        change: after / before - 1.0,
    }
}

/// Everything that was published about what is measured here.
pub const PUBLISHED: &[Published] = &[
    // "KVM: x86/mmu: Complete prefetch for trailing SPTEs for direct, legacy MMU" (2021): the first byte
    // of every page in 6 GiB of preallocated memory.
    numbers("prefetch", "sequential", "pf_fixed", 1.75e6, 0.27e6),
    // "KVM: optimize for MMIO handled" (2011), netperf TCP_RR, the mean of three; EPT and shadow paging.
    numbers("mmio", "rr", "transactions_per_s", 709.48, 727.52),
    // The same, a kernel build in seconds: the mean of three.
    numbers("mmio", "ordinary", "seconds", 154.648, 153.428),
    // "KVM: x86/mmu: Split huge pages mapped by the TDP MMU on fault" (2022): execute_perf_test -s
    // anonymous_hugetlb_1gb -v96.
    numbers(
        "execute",
        "anonymous_hugetlb_1gb/v96",
        "execute_seconds",
        2.899670885,
        0.111965688,
    ),
    numbers(
        "execute",
        "anonymous_hugetlb_1gb/v96",
        "populate_seconds",
        2.748378795,
        2.729544474,
    ),
];

/// What was published about a case, if anything.
pub fn find(experiment: &str, case: &str, metric: &str) -> Option<&'static Published> {
    PUBLISHED.iter().find(|published| {
        published.experiment == experiment && published.case == case && published.metric == metric
    })
}
