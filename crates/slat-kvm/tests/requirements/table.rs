//! Reads the tables of `conformance/requirements`.

use crate::kvm::On;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

/// A program, with its requirements of KVM.
#[derive(Clone, Default)]
pub struct Program {
    pub name: String,
    /// Capabilities that must not be 0.
    pub requires: Vec<Condition>,
    /// Capabilities that the program uses if they exist.
    pub uses: Vec<Condition>,
    /// Ioctls that the program always makes.
    pub calls: Vec<String>,
    /// Ioctls that the program may make.
    pub may_call: Vec<String>,
    /// Capabilities whose KVM_ENABLE_CAP must fail.
    pub must_fail: Vec<String>,
}

/// A condition on the value of a capability.
#[derive(Clone)]
pub struct Condition {
    pub capability: String,
    /// The bits that the value must have. If this is 0, the value must have any bit.
    bits: i32,
}

impl Condition {
    fn parse(text: &str) -> Self {
        let (capability, bits) = text.split_once(" & ").unwrap_or((text, "0"));
        Condition {
            capability: capability.to_owned(),
            bits: bits.parse().unwrap(),
        }
    }

    /// Whether `value` satisfies the condition.
    pub fn holds(&self, value: i32) -> bool {
        value != 0 && value & self.bits == self.bits
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.capability)?;
        match self.bits {
            0 => Ok(()),
            bits => write!(f, " & {bits}"),
        }
    }
}

/// A difference between slat's answers and the kernel's, with its reason.
pub struct Difference {
    pub capabilities: Vec<String>,
    pub ioctls: Vec<String>,
    /// The values that slat returns on every machine: system-wide, and for a VM. For an ioctl, 0 means that slat does
    /// not have it. `None`: the value depends on the machine.
    pub slat: Option<[i32; 2]>,
    /// The condition under which the answers differ. `None`: they differ everywhere.
    pub when: Option<String>,
    pub why: String,
}

/// The contents of all tables.
pub struct Tables {
    pub programs: Vec<Program>,
    pub differences: Vec<Difference>,
    /// Capabilities that no program uses.
    pub unasked: BTreeSet<String>,
    pub capabilities: BTreeMap<String, u32>,
    /// The ioctls of each kind of object.
    pub ioctls: [(On, BTreeMap<String, u32>); 3],
}

impl Tables {
    pub fn read() -> Self {
        let read = |file: &str| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../../conformance/requirements")
                .join(file);
            parse(&std::fs::read_to_string(path).unwrap())
        };
        let mut programs = Vec::new();
        for mut section in read("programs.toml") {
            assert_eq!(section.name, "program");
            section.text("source");
            let program = program(&mut section, &programs);
            section.end();
            programs.push(program);
        }
        let (mut differences, mut unasked) = (Vec::new(), BTreeSet::new());
        for mut section in read("answers.toml") {
            let why = section.text("why");
            let capabilities = section.array("capabilities");
            match section.name.as_str() {
                "difference" => differences.push(Difference {
                    capabilities,
                    ioctls: section.array("ioctls"),
                    slat: section.number("slat").map(|value| {
                        let of_vm = section.number("slat-vm").unwrap_or(value);
                        [value, of_vm].map(|value| value as i32)
                    }),
                    when: section.optional_text("when"),
                    why,
                }),
                "unasked" => unasked.extend(capabilities),
                other => panic!("[[{other}]]"),
            }
            section.end();
        }
        let mut numbers: BTreeMap<_, _> = read("numbers.toml")
            .into_iter()
            .map(|section| (section.name.clone(), section.numbers()))
            .collect();
        let mut take = |name: &str| numbers.remove(name).unwrap();
        let capabilities = take("capabilities");
        let ioctls = [
            (On::System, take("system-ioctls")),
            (On::Vm, take("vm-ioctls")),
            (On::Vcpu, take("vcpu-ioctls")),
        ];
        Tables {
            programs,
            differences,
            unasked,
            capabilities,
            ioctls,
        }
    }

    /// Returns the name of a capability.
    pub fn capability(&self, number: u32) -> Option<&str> {
        let mut names = self.capabilities.iter();
        let (name, _) = names.find(|(_, known)| **known == number)?;
        Some(name)
    }
}

fn program(section: &mut Section, known: &[Program]) -> Program {
    let like = section.optional_text("like").map(|like| {
        let mut programs = known.iter();
        let found = programs.find(|program| program.name == like);
        found.unwrap_or_else(|| panic!("no {like} above")).clone()
    });
    let mut program = like.unwrap_or_default();
    program.name = section.text("name");
    let conditions = |texts: Vec<String>| texts.into_iter().map(|text| Condition::parse(&text));
    program
        .requires
        .extend(conditions(section.array("requires")));
    program.uses.extend(conditions(section.array("uses")));
    program.calls.extend(section.array("calls"));
    program.may_call.extend(section.array("may-call"));
    program.must_fail.extend(section.array("must-fail"));
    program
}

enum Value {
    Text(String),
    Number(u32),
    Array(Vec<String>),
}

/// `[name]` or `[[name]]`, and the keys below it.
struct Section {
    name: String,
    keys: BTreeMap<String, Value>,
}

impl Section {
    fn optional_text(&mut self, key: &str) -> Option<String> {
        match self.keys.remove(key)? {
            Value::Text(text) => Some(text),
            _ => panic!("{key} of [[{}]] is no string", self.name),
        }
    }

    fn text(&mut self, key: &str) -> String {
        let text = self.optional_text(key);
        text.unwrap_or_else(|| panic!("a [[{}]] has no {key}", self.name))
    }

    fn number(&mut self, key: &str) -> Option<u32> {
        match self.keys.remove(key)? {
            Value::Number(number) => Some(number),
            _ => panic!("{key} of [[{}]] is no number", self.name),
        }
    }

    fn array(&mut self, key: &str) -> Vec<String> {
        match self.keys.remove(key) {
            None => Vec::new(),
            Some(Value::Array(array)) => array,
            Some(_) => panic!("{key} of [[{}]] is no array", self.name),
        }
    }

    /// Returns the numbers, by key, of a section that has only numbers.
    fn numbers(mut self) -> BTreeMap<String, u32> {
        let keys: Vec<_> = self.keys.keys().cloned().collect();
        let number = |key: String| {
            let number = self.number(&key).unwrap();
            (key, number)
        };
        keys.into_iter().map(number).collect()
    }

    /// Fails if there are keys that the test has not read.
    fn end(self) {
        let keys: Vec<_> = self.keys.into_keys().collect();
        assert!(keys.is_empty(), "unknown in [[{}]]: {keys:?}", self.name);
    }
}

/// Parses the subset of TOML that `programs.toml` describes, and numbers.
fn parse(text: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    let mut lines = text.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            let name = name.trim_matches(['[', ']']).to_owned();
            let keys = BTreeMap::new();
            sections.push(Section { name, keys });
            continue;
        }
        let (key, value) = line.split_once(" = ").unwrap_or_else(|| panic!("{line}"));
        let value = match value.strip_prefix('[') {
            None => scalar(value),
            Some(first) => {
                let mut items = first.to_owned();
                while !items.ends_with(']') {
                    items.push_str(lines.next().unwrap());
                }
                Value::Array(strings(items.trim_end_matches(']')))
            }
        };
        let section = sections.last_mut().unwrap();
        let before = section.keys.insert(key.to_owned(), value);
        assert!(before.is_none(), "{key} twice in [[{}]]", section.name);
    }
    sections
}

fn scalar(text: &str) -> Value {
    let quoted = text
        .strip_prefix('"')
        .and_then(|text| text.strip_suffix('"'));
    if let Some(text) = quoted {
        return Value::Text(text.to_owned());
    }
    let number = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    Value::Number(number.unwrap_or_else(|_| panic!("neither a number nor a string: {text}")))
}

/// Returns the strings of an array without its brackets.
fn strings(items: &str) -> Vec<String> {
    let items = items.split(',').map(str::trim);
    let strings = items
        .filter(|item| !item.is_empty())
        .map(|item| match scalar(item) {
            Value::Text(text) => text,
            _ => panic!("no string: {item}"),
        });
    strings.collect()
}
