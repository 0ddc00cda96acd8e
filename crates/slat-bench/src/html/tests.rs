use super::*;

#[test]
fn every_experiment_has_a_section_even_if_nothing_was_measured() {
    let all: Vec<_> = crate::EXPERIMENTS.iter().collect();
    let page = page(&all, &Report::default(), Size::Tiny);
    for Experiment { name, .. } in all {
        assert!(page.contains(&format!("<section id=\"{name}\">")), "{name}");
        assert!(page.contains(&format!("href=\"#{name}\"")), "{name}");
    }
}
