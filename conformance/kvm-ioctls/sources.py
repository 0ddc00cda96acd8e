#!/usr/bin/env python3
"""Has cargo fetch kvm-ioctls and crates that use it, and makes two workspaces of their sources: sources.py REPOSITORY DIRECTORY

DIRECTORY/preload: the crates as they are, for programs that slat run starts.
DIRECTORY/api: the same with slat-kvm in kvm-ioctls' place; of kvm-ioctls itself, its examples (kvm-ioctls-docs) and its unit tests
(kvm-ioctls-tests).

Older crates get the versions of kvm-ioctls, kvm-bindings and vmm-sys-util that slat-kvm has, and the few changes in CHANGES.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

CRATES = {
    "kvm-ioctls": "0.25.1",
    "dbs-arch": "0.2.3",
    "dbs-boot": "0.4.0",
    "dbs-interrupt": "0.2.2",
    "vfio-ioctls": "0.10.0",
}
VERSIONS = {"kvm-ioctls": "0.25.1", "kvm-bindings": "0.14", "vmm-sys-util": "0.15"}
DEFAULT_FEATURES = {"dbs-interrupt": ["kvm-legacy-irq", "kvm-msi-irq"]}

# Where a crate needs more than newer versions of what it depends on: file, what stands there, what takes its place.
CHANGES = {
    "dbs-interrupt": [
        (
            "src/kvm/mod.rs",
            ".set_gsi_routing(irq_routing)",
            ".set_gsi_routing(&kvm_bindings::KvmIrqRouting::from_entries(irq_routing_entries).unwrap())",
        ),
    ],
}

# kvm-ioctls' unit tests that make objects of bad descriptors by private fields, and what others read of private fields.
PRIVATE_TESTS = ["test_bad_kvm_fd", "test_faulty_vm_fd"]
PRIVATE_FIELDS = {
    ".kvm_run_ptr.as_mut_ref()": ".get_kvm_run()",
    ".kvm_run_ptr.as_ref()": ".get_kvm_run()",
}


def manifest(name, dependencies, extra=""):
    lines = "\n".join(f"{key} = {value}" for key, value in dependencies.items())
    package = f'[package]\nname = "{name}"\nversion = "0.0.0"\nedition = "2024"\n'
    return f"{package}{extra}\n[dependencies]\n{lines}\n"


def fetch(directory):
    """Returns the directory of each crate's source in cargo's cache."""
    here = directory / "fetch"
    (here / "src").mkdir(parents=True, exist_ok=True)
    (here / "src/lib.rs").touch()
    (here / "Cargo.toml").write_text(
        manifest("fetch", {name: f'"={version}"' for name, version in CRATES.items()})
        + "[workspace]\n"
    )
    metadata = subprocess.run(
        ["cargo", "metadata", "-q", "--format-version", "1"],
        cwd=here,
        check=True,
        stdout=subprocess.PIPE,
    )
    packages = json.loads(metadata.stdout)["packages"]
    return {
        package["name"]: pathlib.Path(package["manifest_path"]).parent
        for package in packages
        if package["version"] == CRATES.get(package["name"])
    }


def copy(name, source, to):
    shutil.copytree(source, to)
    (to / "Cargo.lock").unlink(missing_ok=True)
    path = to / "Cargo.toml"
    text = path.read_text()
    for dependency, version in VERSIONS.items():
        old = rf'(\[dependencies\.{dependency}\]\nversion = )"[^"]*"'
        text = re.sub(old, rf'\g<1>"{version}"', text)
    if name in DEFAULT_FEATURES:
        features = ", ".join(f'"{feature}"' for feature in DEFAULT_FEATURES[name])
        text = re.sub(r"(?m)^default = \[", f"default = [{features}, ", text)
    path.write_text(text)
    for file, old, new in CHANGES.get(name, []):
        text = (to / file).read_text()
        assert old in text, f"{name}: {file} has no {old}"
        (to / file).write_text(text.replace(old, new))


def workspace(directory, members, patches):
    text = f"[workspace]\nresolver = \"2\"\nmembers = {json.dumps(members)}\n\n[patch.crates-io]\n"
    text += "".join(f'{name} = {{ path = "{name}" }}\n' for name in patches)
    (directory / "Cargo.toml").write_text(text)


def without_functions(text, names):
    """Removes tests: from #[test] to the brace at the same indentation."""
    for name in names:
        test = rf"(?ms)^    #\[test\]\n(?:    #\[[^\n]*\n)*    fn {name}\(\) \{{\n.*?^    \}}\n"
        text = re.sub(test, "", text)
    return text


def unit_tests(source):
    """Makes one library of kvm-ioctls' unit tests, which find what they use where kvm-ioctls has it."""
    modules = ""
    for file in ["system", "vm", "vcpu", "device"]:
        text = (source / f"src/ioctls/{file}.rs").read_text()
        start = text.index("mod tests {")
        # What the tests get by `use super::*`, but for the crate's own items.
        uses = re.findall(r"(?ms)^use (?!crate::)[^;]*;", text[:start])
        tests = without_functions(text[start:], PRIVATE_TESTS)
        for private, public in PRIVATE_FIELDS.items():
            tests = tests.replace(private, public)
        uses = "\n".join(f"#[allow(unused_imports)]\n{use}" for use in uses)
        modules += f"pub mod {file} {{\n#[allow(unused_imports)]\npub use kvm_ioctls::*;\n{uses}\n#[cfg(test)]\n{tests}\n}}\n"
    return f"#![allow(hidden_glob_reexports)]\npub use kvm_ioctls::*;\npub mod cap {{ pub use kvm_ioctls::Cap; }}\npub mod ioctls {{\n{modules}}}\n"


def main():
    repository, directory = map(pathlib.Path, sys.argv[1:])
    # New files would have cargo build everything again.
    stamp, made_by = directory / "made-by", f"{repository}\n{pathlib.Path(__file__).read_text()}"
    if stamp.exists() and stamp.read_text() == made_by:
        return
    stamp.unlink(missing_ok=True)
    sources = fetch(directory)
    slat_kvm = f'{{ package = "slat-kvm", path = "{repository}/crates/slat-kvm" }}'

    preload, api = directory / "preload", directory / "api"
    for old in [preload, api]:
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir()

    for name, source in sources.items():
        copy(name, source, preload / name)
    workspace(preload, list(sources), ["kvm-ioctls", "dbs-arch"])

    users = [name for name in sources if name != "kvm-ioctls"]
    for name in users:
        copy(name, sources[name], api / name)
        path = api / name / "Cargo.toml"
        old = r'\[dependencies\.kvm-ioctls\]\nversion = "[^"]*"'
        new = f'[dependencies.kvm-ioctls]\npackage = "slat-kvm"\npath = "{repository}/crates/slat-kvm"'
        path.write_text(re.sub(old, lambda _: new, path.read_text()))

    common = {
        "kvm-ioctls": slat_kvm,
        "kvm-bindings": '{ version = "0.14", features = ["fam-wrappers"] }',
        "libc": '"0.2"',
        "vmm-sys-util": '"0.15"',
        "bitflags": '"2"',
        "byteorder": '"1"',
    }
    # Their source is kvm-ioctls' own, and the crate that they `use` is slat-kvm.
    docs = api / "kvm-ioctls-docs"
    shutil.copytree(sources["kvm-ioctls"] / "src", docs / "src")
    (docs / "Cargo.toml").write_text(manifest(docs.name, common))
    tests = api / "kvm-ioctls-tests"
    (tests / "src").mkdir(parents=True)
    (tests / "Cargo.toml").write_text(manifest(tests.name, common))
    (tests / "src/lib.rs").write_text(unit_tests(sources["kvm-ioctls"]))
    workspace(api, users + [docs.name, tests.name], ["dbs-arch"])
    stamp.write_text(made_by)


if __name__ == "__main__":
    main()
