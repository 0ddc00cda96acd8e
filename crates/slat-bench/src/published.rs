//! The results of the references, as data.

/// A published result of one case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Published {
    /// The experiment, as in [`crate::report::Row`].
    pub experiment: &'static str,
    /// The case, as in [`crate::report::Row`].
    pub case: &'static str,
    /// The metric, as in [`crate::report::Row`].
    pub metric: &'static str,
    /// The value without the mechanism, in the metric's unit; `None` if only the change was published.
    pub before: Option<f64>,
    /// The value with the mechanism, in the metric's unit; `None` if only the change was published.
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

const fn change(
    experiment: &'static str,
    case: &'static str,
    metric: &'static str,
    change: f64,
) -> Published {
    Published {
        experiment,
        case,
        metric,
        before: None,
        after: None,
        change,
    }
}

/// All published results about the metrics that are measured here.
pub const PUBLISHED: &[Published] = &[
    // "KVM: x86/mmu: Complete prefetch for trailing SPTEs for direct, legacy MMU" (2021): the first byte
    // of every page in 6 GiB of preallocated memory.
    numbers("prefetch", "sequential", "pf_fixed", 1.75e6, 0.27e6),
    // "KVM: optimize for MMIO handled" (2011), netperf TCP_RR, the mean of three; EPT and shadow paging.
    numbers("mmio", "rr", "transactions_per_s", 709.48, 727.52),
    // "KVM: optimize for MMIO handled" (2011), a kernel build in seconds: the mean of three.
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
    // "KVM: arm64: Make stage2_split_walker() skip unnecessary walks" (2026): a slot of 64 GiB, dirty log
    // enabled (1) and cleared (2), on memory of 4 KiB, transparent huge and 1 GiB pages.
    change("split", "enable/4k", "seconds", -0.3547),
    change("split", "enable/thp", "seconds", -0.1194),
    change("split", "enable/1g", "seconds", -0.1446),
    change("split", "clear/4k", "seconds", -0.2636),
    change("split", "clear/thp", "seconds", -0.1205),
    change("split", "clear/1g", "seconds", -0.1387),
    // "KVM: Scalable memslots implementation" (2021): memslot_perf_test, by the number of slots.
    numbers("memslots", "map/10", "seconds_per_op", 0.0192, 0.0186),
    numbers("memslots", "unmap/10", "seconds_per_op", 0.0313, 0.031),
    numbers(
        "memslots",
        "unmap-2m/10",
        "seconds_per_op",
        0.000348,
        0.000351,
    ),
    numbers(
        "memslots",
        "move-active/10",
        "seconds_per_op",
        0.00011,
        9.48e-5,
    ),
    numbers(
        "memslots",
        "move-inactive/10",
        "seconds_per_op",
        0.000111,
        9.33e-5,
    ),
    numbers("memslots", "setup/10", "seconds_per_op", 0.000342, 0.000283),
    numbers("memslots", "map/30", "seconds_per_op", 0.0192, 0.019),
    numbers("memslots", "unmap/30", "seconds_per_op", 0.0325, 0.031),
    numbers(
        "memslots",
        "unmap-2m/30",
        "seconds_per_op",
        0.000373,
        0.000373,
    ),
    numbers(
        "memslots",
        "move-active/30",
        "seconds_per_op",
        0.0001,
        8.65e-5,
    ),
    numbers(
        "memslots",
        "move-inactive/30",
        "seconds_per_op",
        0.000106,
        9.18e-5,
    ),
    numbers("memslots", "setup/30", "seconds_per_op", 0.000989, 0.000775),
    numbers("memslots", "map/50", "seconds_per_op", 0.0192, 0.019),
    numbers("memslots", "unmap/50", "seconds_per_op", 0.0339, 0.0311),
    numbers(
        "memslots",
        "unmap-2m/50",
        "seconds_per_op",
        0.000399,
        0.000395,
    ),
    numbers(
        "memslots",
        "move-active/50",
        "seconds_per_op",
        9.99e-5,
        8.54e-5,
    ),
    numbers(
        "memslots",
        "move-inactive/50",
        "seconds_per_op",
        9.92e-5,
        8.26e-5,
    ),
    numbers("memslots", "setup/50", "seconds_per_op", 0.00141, 0.00099),
    numbers("memslots", "map/100", "seconds_per_op", 0.0195, 0.0191),
    numbers("memslots", "unmap/100", "seconds_per_op", 0.0374, 0.0312),
    numbers(
        "memslots",
        "unmap-2m/100",
        "seconds_per_op",
        0.00047,
        0.000447,
    ),
    numbers(
        "memslots",
        "move-active/100",
        "seconds_per_op",
        9.56e-5,
        8e-5,
    ),
    numbers(
        "memslots",
        "move-inactive/100",
        "seconds_per_op",
        0.000101,
        8.4e-5,
    ),
    numbers("memslots", "setup/100", "seconds_per_op", 0.0026, 0.00174),
    numbers("memslots", "map/509", "seconds_per_op", 0.0232, 0.0223),
    numbers("memslots", "unmap/509", "seconds_per_op", 0.0724, 0.0315),
    numbers(
        "memslots",
        "unmap-2m/509",
        "seconds_per_op",
        0.00155,
        0.000869,
    ),
    numbers(
        "memslots",
        "move-active/509",
        "seconds_per_op",
        0.000101,
        7.92e-5,
    ),
    numbers(
        "memslots",
        "move-inactive/509",
        "seconds_per_op",
        0.000108,
        8.47e-5,
    ),
    numbers("memslots", "setup/509", "seconds_per_op", 0.0135, 0.00803),
    numbers("memslots", "map/8194", "seconds_per_op", 0.2, 0.0541),
    numbers("memslots", "unmap/32764", "seconds_per_op", 3.88, 0.0351),
    numbers("memslots", "unmap-2m/32764", "seconds_per_op", 3.88, 0.0348),
    numbers(
        "memslots",
        "move-active/32764",
        "seconds_per_op",
        0.00142,
        7.86e-5,
    ),
    numbers(
        "memslots",
        "move-inactive/32764",
        "seconds_per_op",
        0.00148,
        8.8e-5,
    ),
    numbers("memslots", "setup/32764", "seconds_per_op", 16.1, 0.59),
];

/// Returns the published result for a case and a metric, if there is one.
pub fn find(experiment: &str, case: &str, metric: &str) -> Option<&'static Published> {
    PUBLISHED.iter().find(|published| {
        published.experiment == experiment && published.case == case && published.metric == metric
    })
}
