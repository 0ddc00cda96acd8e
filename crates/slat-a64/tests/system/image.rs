//! The image that both machines load: the payload, the tables of its own half, the commands, and the random tables.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The address of the image. QEMU puts its device tree below this address.
pub const BASE: u64 = 0x4020_0000;
pub const TABLE: u64 = 0x4021_0000;
pub const STUB: u64 = 0x4022_0000;
pub const COMMANDS: u64 = 0x4030_0000;
/// Random tables, for each granule and level 64 KiB.
pub const TABLES: u64 = 0x4050_0000;
/// Words that are SVC #1 twice.
pub const DATA: u64 = 0x4060_0000;
pub const DATA_END: u64 = 0x4080_0000;
/// A block of zeros.
pub const ZEROS: u64 = 0x4200_0000;
pub const UART: u64 = 0x0900_0000;
pub const RAM: u64 = 0x4000_0000;
pub const RAM_BYTES: u64 = 64 << 20;

/// The base of the upper half's own table.
pub const UPPER: u64 = 0xffff_ff80_0000_0000;
/// SVC #1.
const SVC_1: u64 = 0xd400_0021;
const SVC_0: u32 = 0xd400_0001;

/// A command's words.
pub type Words = [u64; 16];

pub struct Image(pub Vec<u8>);

impl Image {
    fn put(&mut self, at: u64, value: u64) {
        let at = (at - BASE) as usize;
        self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    /// Makes the image, with a table's contents by granule (0 to 2), level and index.
    pub fn new(
        code: &[u8],
        commands: &[Words],
        mut descriptor: impl FnMut(u64, u64) -> u64,
    ) -> Self {
        let mut image = Image(vec![0; (DATA_END - BASE) as usize]);
        image.0[..code.len()].copy_from_slice(code);
        // Devices; memory that can be read and executed by all; memory that EL1 can write.
        let [device, normal] = [6 << 2 | 1 | 1 << 10, 7 << 2 | 1 | 1 << 10 | 3 << 8];
        let never = 3 << 53;
        image.put(TABLE, device | never);
        image.put(TABLE + 8, RAM | normal | 3 << 6);
        image.put(TABLE + 16, RAM | normal | never);
        image.put(STUB + 16, u64::from(SVC_0) << 32 | u64::from(SVC_0));
        assert!(COMMANDS + 128 * (commands.len() as u64 + 1) <= TABLES);
        for (n, words) in commands.iter().enumerate() {
            for (k, word) in words.iter().enumerate() {
                image.put(COMMANDS + 128 * n as u64 + 8 * k as u64, *word);
            }
        }
        for granule in 0..3 {
            for level in 0..4 {
                let table = tables(granule, level);
                for n in 0..8192 {
                    image.put(table + 8 * n, descriptor(granule, level));
                }
            }
        }
        for at in (DATA..DATA_END).step_by(8) {
            image.put(at, SVC_1 << 32 | SVC_1);
        }
        image
    }
}

/// Returns the address of the random tables of a granule and level.
pub fn tables(granule: u64, level: u64) -> u64 {
    TABLES + ((granule * 4 + level) << 16)
}

fn run(program: &str, arguments: &[&str]) -> Option<()> {
    let status = Command::new(program).args(arguments).status().ok()?;
    assert!(status.success(), "{program} {arguments:?}");
    Some(())
}

/// Assembles the payload. `None`: the tools are absent.
pub fn assemble(directory: &Path) -> Option<Vec<u8>> {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/system/payload.s");
    let [object, linked, flat] =
        ["o", "elf", "bin"].map(|kind| directory.join(format!("payload.{kind}")));
    let [source, object, linked, flat] =
        [&source, &object, &linked, &flat].map(|path| path.to_str().unwrap());
    run("aarch64-linux-gnu-as", &["-o", object, source])?;
    run(
        "aarch64-linux-gnu-ld",
        &[
            "-e",
            "0x40200000",
            "-Ttext=0x40200000",
            "-o",
            linked,
            object,
        ],
    )?;
    run("aarch64-linux-gnu-objcopy", &["-O", "binary", linked, flat])?;
    Some(std::fs::read(flat).unwrap())
}

/// Executes an image in QEMU, and returns the text that it has written to the UART. `None`: QEMU is absent.
pub fn qemu(directory: &Path, image: &Image) -> Option<Vec<u8>> {
    let [file, output] = ["image", "uart"].map(|name| directory.join(name));
    std::fs::write(&file, &image.0).unwrap();
    let loader = format!("loader,file={},addr={BASE:#x},force-raw=on", file.display());
    let start = format!("loader,addr={BASE:#x},cpu-num=0");
    let serial = format!("file:{}", output.display());
    let memory = format!("{}M", RAM_BYTES >> 20);
    let arguments = [
        "120",
        "qemu-system-aarch64",
        "-M",
        "virt",
        "-cpu",
        "neoverse-n1",
        "-m",
        &memory,
        "-display",
        "none",
        "-monitor",
        "none",
        "-serial",
        &serial,
        "-device",
        &loader,
        "-device",
        &start,
    ];
    let missing = Command::new("qemu-system-aarch64")
        .arg("--version")
        .output()
        .is_err();
    if missing {
        return None;
    }
    run("timeout", &arguments)?;
    Some(std::fs::read(output).unwrap())
}
