//! Checks that `slat map` shows the process's own counts.

use serde_json::Value;

use super::harness::{Client, Scratch, as_another, poll, text, unless};

/// Asks for the cells of all memory of a client.
fn map(scratch: &Scratch, client: &Client) -> Value {
    let pid = client.pid().to_string();
    let output = scratch.slat(&["map", &pid, "--once", "--json"]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn totals_are_the_counters_of_leaves() {
    for mmu in ["tdp", "direct", "shadow"] {
        let scratch = Scratch::new(&format!("map-{mmu}"));
        let client = scratch.start(&["--mmu", mmu], "maps");
        let counted = scratch.published(client.pid())["vms"][0]["memory"].clone();
        let process = map(&scratch, &client);
        let vm = &process["vms"][0];
        assert_eq!((&vm["vm"], &vm["mmu"]), (&0.into(), &mmu.into()));
        assert_eq!(vm["total"]["4k"], counted["pages_4k"], "{vm}");
        assert_eq!(vm["total"]["4k"], 16, "{vm}");
        assert_eq!(vm["total"].get("2m"), None);
        // The device read is cached, whether or not there is a memslot.
        let device = &vm["holes"][0];
        let expected = [0x10_1000, 4096].map(Value::from);
        if mmu != "shadow" {
            assert_eq!([&device["gpa"], &device["size"]], expected.each_ref());
            assert_eq!(device["total"]["mmio"], 1);
        }
        let slots = vm["slots"].as_array().unwrap();
        let shown = |slot: &Value| {
            (
                slot["slot"].clone(),
                slot["gpa"].clone(),
                slot["size"].clone(),
            )
        };
        let shown: Vec<_> = slots.iter().map(shown).collect();
        let expected = [
            (0, 0, 1 << 20),
            (1, 2 << 20, 4 << 20),
            (2, 8 << 20, 1 << 12),
        ];
        let expected = expected.map(|(id, gpa, size)| (id.into(), gpa.into(), size.into()));
        assert_eq!(shown, expected);
        assert_eq!(slots[0]["flags"], Value::Array(Vec::new()));
        assert_eq!(slots[1]["flags"][0], "logging");
        assert_eq!(slots[2]["flags"][0], "read-only");
        // 256 pages are in 64 cells. Page 0 has code, and 15 more pages were written.
        let cells = slots[0]["cells"].as_array().unwrap();
        assert_eq!((cells.len(), &slots[0]["cell_pages"]), (64, &4.into()));
        assert!(cells[..4].iter().all(|cell| cell["4k"] == 4), "{vm}");
        assert!(cells[4..].iter().all(|cell| *cell == serde_json::json!({})));
    }
}

#[test]
fn one_vm_is_chosen_by_its_number() {
    let scratch = Scratch::new("map-vm");
    let client = scratch.start(&[], "many");
    let pid = client.pid().to_string();
    scratch.published(client.pid());
    let vms = |arguments: &[&str]| {
        let all = [&["map", &pid, "--once"], arguments].concat();
        let output = scratch.slat(&all).output().unwrap();
        (
            text(&output.stdout).matches("\nVM ").count(),
            text(&output.stderr),
        )
    };
    assert_eq!(vms(&[]).0, super::vms());
    assert_eq!(vms(&["--vm", "7"]).0, 1);
    let (none, error) = vms(&["--vm", "1000000"]);
    assert!(none == 0 && error.contains("has no VM 1000000"), "{error}");
}

#[test]
fn memslots_may_change_meanwhile() {
    let scratch = Scratch::new("map-changes");
    let client = scratch.start(&[], "changes_memslots");
    scratch.published(client.pid());
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..40 {
        let process = map(&scratch, &client);
        let slots = process["vms"][0]["slots"].as_array().unwrap();
        let ids: Vec<_> = slots
            .iter()
            .map(|slot| slot["slot"].as_u64().unwrap())
            .collect();
        assert!(ids.starts_with(&[0, 1]), "{ids:?}");
        seen.extend(ids);
    }
    assert!(seen.len() > 3, "others are seen now and then: {seen:?}");
    let process = poll(30, || {
        let process = scratch.published(client.pid());
        let changes = &process["vms"][0]["memory"]["slot_changes"];
        let are_many = changes.as_u64().unwrap() > 100;
        unless(are_many, &format!("{changes} changes")).map(|()| process)
    });
    assert_eq!(process["vms"][0]["vcpus"][0]["state"], "runs");
}

#[test]
fn a_page_has_what_the_picture_has() {
    let scratch = Scratch::new("map-page");
    let client = scratch.start(&[], "maps");
    let pid = client.pid().to_string();
    scratch.published(client.pid());
    let file = scratch.0.join("map.html");
    let html = scratch
        .slat(&["map", &pid, "--html", file.to_str().unwrap()])
        .output();
    assert!(html.unwrap().status.success());
    let page = std::fs::read_to_string(&file).unwrap();
    let picture = scratch.slat(&["map", &pid, "--once"]).output().unwrap();
    let picture = text(&picture.stdout);
    for words in [
        "memslot 1: 0x200000-0x5fffff (4 MiB)",
        "logging",
        "read-only",
    ] {
        assert!(
            page.contains(words) && picture.contains(words),
            "{words}: {picture}"
        );
    }
    assert!(page.contains("pages: 16 in 4 KiB leaves"), "{page}");
    assert!(picture.contains("4k        ####....."), "{picture}");
}

#[test]
fn another_user_gets_no_picture() {
    let scratch = Scratch::new("map-another");
    let client = scratch.start(&[], "halts");
    let pid = client.pid().to_string();
    scratch.published(client.pid());
    let Some(output) = as_another(&scratch, &["map", "--once", &pid]) else {
        return;
    };
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let error = text(&output.stderr);
    assert!(error.contains("another user"), "{error}");
}
