//! The published results with which measurements are compared.

/// The published results of one metric of an experiment.
pub struct Published {
    /// The experiment, as in [`crate::report::Row`].
    pub experiment: &'static str,
    /// The metric, as in [`crate::report::Row`].
    metric: &'static str,
    /// The cases, as in [`crate::report::Row`], each with the relative change that the mechanism causes. −0.73 means 73
    /// % less.
    cases: &'static [(&'static str, f64)],
}

/// Returns the relative change of a metric, from its published values without the mechanism and with it.
const fn change(before: f64, after: f64) -> f64 {
    after / before - 1.0
}

/// All published results for the metrics that this crate measures.
pub const PUBLISHED: &[Published] = &[
    // "KVM: x86/mmu: Complete prefetch for trailing SPTEs for direct, legacy MMU" (2021): the guest touches the first
    // byte of every page in 6 GiB of preallocated memory.
    Published {
        experiment: "prefetch",
        metric: "pf_fixed",
        cases: &[("sequential", change(1.75e6, 0.27e6))],
    },
    // "KVM: optimize for MMIO handled" (2011): netperf TCP_RR, the mean of three runs, with EPT and with shadow paging.
    Published {
        experiment: "mmio",
        metric: "transactions_per_s",
        cases: &[("rr", change(709.48, 727.52))],
    },
    // "KVM: optimize for MMIO handled" (2011): the seconds of a kernel build, the mean of three builds.
    Published {
        experiment: "mmio",
        metric: "seconds",
        cases: &[("ordinary", change(154.648, 153.428))],
    },
    // "KVM: x86/mmu: Split huge pages mapped by the TDP MMU on fault" (2022): execute_perf_test -s
    // anonymous_hugetlb_1gb -v96.
    Published {
        experiment: "execute",
        metric: "execute_seconds",
        cases: &[(
            "anonymous_hugetlb_1gb/v96",
            change(2.899670885, 0.111965688),
        )],
    },
    Published {
        experiment: "execute",
        metric: "populate_seconds",
        cases: &[(
            "anonymous_hugetlb_1gb/v96",
            change(2.748378795, 2.729544474),
        )],
    },
    // "KVM: arm64: Make stage2_split_walker() skip unnecessary walks" (2026): a slot of 64 GiB, whose dirty log is
    // enabled (1) and cleared (2). The memory is mapped by 4 KiB pages, transparent huge pages and 1 GiB pages.
    Published {
        experiment: "split",
        metric: "seconds",
        cases: &[
            ("enable/4k", -0.3547),
            ("enable/thp", -0.1194),
            ("enable/1g", -0.1446),
            ("clear/4k", -0.2636),
            ("clear/thp", -0.1205),
            ("clear/1g", -0.1387),
        ],
    },
    // "KVM: Scalable memslots implementation" (2021): the results of memslot_perf_test for several numbers of slots.
    Published {
        experiment: "memslots",
        metric: "seconds_per_op",
        cases: &[
            ("map/10", change(0.0192, 0.0186)),
            ("unmap/10", change(0.0313, 0.031)),
            ("unmap-2m/10", change(0.000348, 0.000351)),
            ("move-active/10", change(0.00011, 9.48e-5)),
            ("move-inactive/10", change(0.000111, 9.33e-5)),
            ("setup/10", change(0.000342, 0.000283)),
            ("map/30", change(0.0192, 0.019)),
            ("unmap/30", change(0.0325, 0.031)),
            ("unmap-2m/30", change(0.000373, 0.000373)),
            ("move-active/30", change(0.0001, 8.65e-5)),
            ("move-inactive/30", change(0.000106, 9.18e-5)),
            ("setup/30", change(0.000989, 0.000775)),
            ("map/50", change(0.0192, 0.019)),
            ("unmap/50", change(0.0339, 0.0311)),
            ("unmap-2m/50", change(0.000399, 0.000395)),
            ("move-active/50", change(9.99e-5, 8.54e-5)),
            ("move-inactive/50", change(9.92e-5, 8.26e-5)),
            ("setup/50", change(0.00141, 0.00099)),
            ("map/100", change(0.0195, 0.0191)),
            ("unmap/100", change(0.0374, 0.0312)),
            ("unmap-2m/100", change(0.00047, 0.000447)),
            ("move-active/100", change(9.56e-5, 8e-5)),
            ("move-inactive/100", change(0.000101, 8.4e-5)),
            ("setup/100", change(0.0026, 0.00174)),
            ("map/509", change(0.0232, 0.0223)),
            ("unmap/509", change(0.0724, 0.0315)),
            ("unmap-2m/509", change(0.00155, 0.000869)),
            ("move-active/509", change(0.000101, 7.92e-5)),
            ("move-inactive/509", change(0.000108, 8.47e-5)),
            ("setup/509", change(0.0135, 0.00803)),
            ("map/8194", change(0.2, 0.0541)),
            ("unmap/32764", change(3.88, 0.0351)),
            ("unmap-2m/32764", change(3.88, 0.0348)),
            ("move-active/32764", change(0.00142, 7.86e-5)),
            ("move-inactive/32764", change(0.00148, 8.8e-5)),
            ("setup/32764", change(16.1, 0.59)),
        ],
    },
];

/// Returns the published relative change of a metric in a case. `None`: no result was published.
pub fn find(experiment: &str, case: &str, metric: &str) -> Option<f64> {
    let of_metric = PUBLISHED
        .iter()
        .filter(|known| (known.experiment, known.metric) == (experiment, metric));
    let mut cases = of_metric.flat_map(|known| known.cases);
    Some(cases.find(|(known, _)| *known == case)?.1)
}
