//! The flattened device tree (Devicetree Specification, 5) of the board.

use crate::board::{DISTRIBUTOR, FREQUENCY, RAM, RAM_BYTES, REDISTRIBUTOR, UART};
use std::ops::Range;

const BEGIN_NODE: u32 = 1;
const END_NODE: u32 = 2;
const PROPERTY: u32 = 3;
const END: u32 = 9;
const MAGIC: u32 = 0xd00d_feed;
const HEADER: u32 = 40;
const VERSION: u32 = 17;
const COMPATIBLE_VERSION: u32 = 16;
/// The end of the list of reserved memory: two words of 64 bits.
const RESERVATIONS: u32 = 16;

/// The handles of the interrupt controller, and of the UART's clock.
const CONTROLLER: u32 = 1;
const CLOCK: u32 = 2;
/// Interrupts: kinds, and the trigger.
const SPI: u32 = 0;
const PPI: u32 = 1;
const LEVEL: u32 = 4;

#[derive(Default)]
struct Tree {
    nodes: Vec<u8>,
    names: Vec<u8>,
}

impl Tree {
    fn word(&mut self, word: u32) {
        self.nodes.extend(word.to_be_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.nodes.extend(bytes);
        self.nodes.resize(self.nodes.len().next_multiple_of(4), 0);
    }

    fn node(&mut self, name: &str, inside: impl FnOnce(&mut Self)) {
        self.word(BEGIN_NODE);
        self.bytes(format!("{name}\0").as_bytes());
        inside(self);
        self.word(END_NODE);
    }

    fn property(&mut self, name: &str, value: &[u8]) {
        self.word(PROPERTY);
        self.word(value.len() as u32);
        self.word(self.names.len() as u32);
        self.names.extend(format!("{name}\0").as_bytes());
        self.bytes(value);
    }

    fn text(&mut self, name: &str, value: &str) {
        self.property(name, format!("{value}\0").as_bytes());
    }

    fn cells(&mut self, name: &str, cells: &[u32]) {
        let bytes: Vec<u8> = cells.iter().flat_map(|cell| cell.to_be_bytes()).collect();
        self.property(name, &bytes);
    }

    /// A property of addresses and sizes, which have 64 bits each.
    fn ranges(&mut self, name: &str, words: &[u64]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.property(name, &bytes);
    }

    fn finish(mut self) -> Vec<u8> {
        self.word(END);
        let nodes = HEADER + RESERVATIONS;
        let names = nodes + self.nodes.len() as u32;
        let header = [
            MAGIC,
            names + self.names.len() as u32,
            nodes,
            names,
            HEADER,
            VERSION,
            COMPATIBLE_VERSION,
            0,
            self.names.len() as u32,
            self.nodes.len() as u32,
        ];
        let mut all: Vec<u8> = header.iter().flat_map(|word| word.to_be_bytes()).collect();
        all.resize(nodes as usize, 0);
        all.extend(self.nodes);
        all.extend(self.names);
        all
    }
}

/// Returns the device tree of a board with this command line and an initrd at these addresses.
pub fn of_board(line: &str, initrd: Range<u64>) -> Vec<u8> {
    let mut tree = Tree::default();
    tree.node("", |tree| {
        tree.text("compatible", "linux,dummy-virt");
        tree.cells("#address-cells", &[2]);
        tree.cells("#size-cells", &[2]);
        tree.cells("interrupt-parent", &[CONTROLLER]);
        tree.node("chosen", |tree| {
            tree.text("bootargs", line);
            tree.text("stdout-path", "/uart");
            tree.ranges("linux,initrd-start", &[initrd.start]);
            tree.ranges("linux,initrd-end", &[initrd.end]);
        });
        tree.node("memory", |tree| {
            tree.text("device_type", "memory");
            tree.ranges("reg", &[RAM, RAM_BYTES]);
        });
        tree.node("cpus", |tree| {
            tree.cells("#address-cells", &[1]);
            tree.cells("#size-cells", &[0]);
            tree.node("cpu", |tree| {
                tree.text("device_type", "cpu");
                tree.text("compatible", "arm,armv8");
                tree.cells("reg", &[0]);
            });
        });
        tree.node("psci", |tree| {
            tree.text("compatible", "arm,psci-1.0");
            tree.text("method", "hvc");
        });
        tree.node("interrupts", |tree| {
            tree.text("compatible", "arm,gic-v3");
            tree.cells("#interrupt-cells", &[3]);
            tree.property("interrupt-controller", &[]);
            let [distributor, redistributor] = [DISTRIBUTOR, REDISTRIBUTOR];
            tree.ranges(
                "reg",
                &[
                    distributor.0,
                    distributor.1,
                    redistributor.0,
                    redistributor.1,
                ],
            );
            tree.cells("phandle", &[CONTROLLER]);
        });
        tree.node("timer", |tree| {
            tree.text("compatible", "arm,armv8-timer");
            tree.property("always-on", &[]);
            // Two that the board does not have, then the physical and the virtual timer: PPIs 30 and 27.
            let [physical, virtual_timer] = [30, 27].map(|intid| [PPI, intid - 16, LEVEL]);
            tree.cells(
                "interrupts",
                &[[PPI, 13, LEVEL], physical, virtual_timer, [PPI, 10, LEVEL]].concat(),
            );
        });
        tree.node("clock", |tree| {
            tree.text("compatible", "fixed-clock");
            tree.cells("#clock-cells", &[0]);
            tree.cells("clock-frequency", &[FREQUENCY as u32]);
            tree.cells("phandle", &[CLOCK]);
        });
        tree.node("uart", |tree| {
            tree.text("compatible", "arm,pl011\0arm,primecell");
            tree.ranges("reg", &[UART.0, UART.1]);
            tree.cells("interrupts", &[SPI, UART.2 - 32, LEVEL]);
            tree.cells("clocks", &[CLOCK, CLOCK]);
            tree.text("clock-names", "uartclk\0apb_pclk");
        });
    });
    tree.finish()
}
