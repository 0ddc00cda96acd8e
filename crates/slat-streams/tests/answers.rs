//! slat's answers are those of KVM's lists; the host's kernel has the same, but for the differences that the lists name.

use slat_streams::answers::api::Who;
use slat_streams::answers::{fresh, rules};

fn both(check: impl Fn(Who) -> Vec<String>) {
    let wrong = [Who::Slat, Who::Kernel].map(|who| (who, check(who)));
    assert!(
        wrong.iter().all(|(_, wrong)| wrong.is_empty()),
        "{wrong:#?}"
    );
}

#[test]
fn set_requests_refuse_what_kvm_refuses() {
    both(|who| {
        rules::all()
            .filter(|rule| who == Who::Slat || rule.differs.is_none())
            .flat_map(|rule| rule.check(who))
            .collect()
    });
}

#[test]
fn new_objects_are_in_kvms_state() {
    both(|who| {
        let all = fresh::all();
        let mut wrong: Vec<_> = all.iter().filter_map(|one| one.check(who)).collect();
        wrong.extend(fresh::check_msrs(who));
        wrong
    });
}
