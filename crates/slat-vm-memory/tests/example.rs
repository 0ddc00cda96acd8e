//! Checks the lines that the example prints.

#[allow(dead_code)]
#[path = "../examples/one_log.rs"]
mod one_log;

#[test]
fn the_example_tells_the_writers_apart() {
    let expected = [
        "loader: 0x1000",
        "guest: 0x1000 0x2000 0x3000",
        "device: 0x4000 0x7000 0x8000",
        "guest: 0x4000 0x6000",
    ];
    assert_eq!(one_log::run().unwrap(), expected);
}
