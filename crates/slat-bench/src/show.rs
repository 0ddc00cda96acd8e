//! The tables on the terminal. For each comparison of an experiment they show the change, the published change, and the
//! distance to the limit.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use crate::Experiment;
use crate::compared::{COLUMNS, Grid, Rows, groups};
use crate::report::Report;

/// Formats the table of an experiment. It is at most `columns` characters wide.
pub fn table(experiment: &Experiment, report: &Report, columns: u16) -> String {
    let lines = (experiment.compare)(report);
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(columns);
    match experiment.rows {
        Rows::Metrics => {
            table.set_header(COLUMNS);
            for (heading, group) in groups(&lines) {
                table.add_row(heading);
                for line in group {
                    let mut cells = line.cells();
                    cells[0].insert_str(0, "  ");
                    table.add_row(cells);
                }
            }
        }
        Rows::Cases => {
            let grid = Grid::new(&lines);
            table.set_header(grid.head);
            for (family, rows) in grid.families {
                table.add_row([family]);
                for mut row in rows {
                    row.cells[0].insert_str(0, "  ");
                    table.add_row(row.cells);
                }
            }
        }
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 1));
        if index > 0 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let table: Vec<_> = table
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect();
    format!(
        "{}: {}\n{}\n",
        experiment.name,
        experiment.title,
        table.join("\n")
    )
}

/// Returns one line for each goal that was not reached. The list is empty if all were reached.
pub fn missed(experiment: &Experiment, report: &Report) -> Vec<String> {
    (experiment.compare)(report)
        .iter()
        .filter_map(|line| {
            let goal = line.asked().filter(|goal| !goal.met)?;
            let why = goal.why.iter().map(|why| format!(": {why}"));
            Some(format!(
                "{} {}: {}{}",
                experiment.name,
                line.name(),
                goal.text,
                why.collect::<String>()
            ))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compared::{Line, shown};
    use crate::report::{Sample, Unit};

    fn report() -> Report {
        let mut report = Report::default();
        for (variant, faults) in [("off", 512), ("window-8", 64), ("kvm", 70)] {
            let sample = Sample::count("pf_fixed", faults);
            report.add("prefetch", "sequential", variant, sample);
        }
        report
    }

    fn line(report: &Report) -> Line {
        Line::compare(
            report,
            "prefetch",
            "sequential",
            "pf_fixed",
            "off",
            "window-8",
        )
        .unwrap()
    }

    #[test]
    fn a_goal_is_met_or_missed_by_what_was_measured() {
        let report = report();
        let met = |line: Line| line.asked().unwrap().met;
        assert!(met(line(&report).change_at_most(-0.875)));
        assert!(!met(line(&report).change_at_most(-0.876)));
        assert!(!met(line(&report).change_at_least(0.0)));
        assert!(met(line(&report).change_within(0.9)));
        assert!(!met(line(&report).change_within(0.8)));
        assert!(met(line(&report).at_most(64.0)));
        assert!(!met(line(&report).at_most(63.0)));
        assert!(met(line(&report).at_least(64.0)));
        assert!(!met(line(&report).at_least(65.0)));
        let limited = line(&report).with_limit("pages", Some(60.0));
        assert!(met(limited.clone().at_most_of_limit(1.1)));
        assert!(!met(limited.at_most_of_limit(1.05)));
        // A goal for a metric that was not measured counts as not reached.
        assert!(!met(line(&report)
            .with_limit("pages", None)
            .at_most_of_limit(9.0)));
    }

    #[test]
    fn what_was_not_measured_has_no_line() {
        let report = report();
        let compare =
            |after| Line::compare(&report, "prefetch", "sequential", "pf_fixed", "off", after);
        assert!(compare("adaptive").is_none());
        assert!(compare("window-8").is_some());
    }

    #[test]
    fn a_table_shows_values_changes_and_what_was_missed_within_its_width() {
        let experiment = Experiment {
            name: "prefetch",
            title: "faults",
            explain: "",
            settable: crate::Settable::None,
            elsewhere: crate::Elsewhere::Nothing,
            run: |_| Ok(()),
            compare: |report| {
                let asked = |most| line(report).change_at_most(most);
                vec![
                    asked(-0.9),
                    asked(-0.95).or_else("luck".into()),
                    asked(-0.8),
                ]
            },
            rows: Rows::Metrics,
        };
        let text = table(&experiment, &report(), 100);
        for part in [
            "off", "512", "window-8", "64", "-87.5 %", "-84.6 %", "kvm", "70", "\u{2717}",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        assert!(
            text.lines().all(|line| line.chars().count() <= 100),
            "{text}"
        );
        let missed = missed(&experiment, &report());
        let line = |rest| format!("prefetch sequential pf_fixed: \u{2264} {rest}");
        assert_eq!(missed, [line("-90.0 %"), line("-95.0 %: luck")]);
    }

    #[test]
    fn values_are_readable() {
        assert_eq!(shown(1_234_567.0, Unit::Count), "1,234,567");
        assert_eq!(shown(0.001_234, Unit::Seconds), "1.23 ms");
        assert_eq!(shown(153.0, Unit::Nanoseconds), "153 ns");
        assert_eq!(shown(2_500_000.0, Unit::PerSecond), "2.50 M/s");
        assert_eq!(shown(343.4, Unit::Mips), "343 MIPS");
        assert_eq!(shown(0.42, Unit::Mips), "0.42 MIPS");
        assert_eq!(shown(0.0123, Unit::Share), "1.23 %");
    }
}
