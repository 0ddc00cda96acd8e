//! Streams of requests on several threads. The requests are made as the preload library makes them: `Object::ioctl`
//! with raw addresses.
//!
//! Each thread, called a lane, gets a part of the fuzzer's bytes. These bytes choose the lane's actions. A lane may
//! make a request, whose argument is valid except for a few changed fields, and is usually at a valid address. It may
//! run a vCPU, until the watchman (a thread that supervises the lanes) ends the KVM_RUN. It may change the mappings of
//! guest memory, and tell slat about the change or not. It may write to memory that is shared with a vCPU. It may close
//! a descriptor.

mod argument;
mod requests;
mod world;

use crate::answers::rules::to_an_edge;
use crate::leaks::{Before, SOON};
use crate::memory::{PAGE, remap, remap_beyond_file};
use crate::watch::{self, Kick, Lane, Slice, Step};
use argument::{BOUNDARIES, Buffer, mutate};
use kvm_bindings::*;
use requests::{Argument, Context, On, REQUESTS, Request};
use slat_host::mappings::{self, HugePages};
use slat_kvm::abi;
use slat_kvm::ioctl::Object;
use slat_model::Rng;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::Once;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use world::{Handle, PAGES, World};

/// The number of lanes of a stream.
const LANES: usize = 3;
/// The guests' programs. Each is in a page of its own, from the start of slot 0.
const PROGRAMS: [&[u8]; 10] = [
    // jmp $
    &[0xeb, 0xfe],
    // mov cx,0x1000; mov [0x2000],cx; loop
    &[
        0xb9, 0x00, 0x10, 0x89, 0x0e, 0x00, 0x20, 0xe2, 0xfa, 0xeb, 0xf5,
    ],
    // inc byte [bx]; add bx,0x100; jmp: writes to all of the memory
    &[0xfe, 0x07, 0x81, 0xc3, 0x00, 0x01, 0xeb, 0xf8],
    // mov al,[0xf000]; mov [0xf008],al; jmp
    &[0xa0, 0x00, 0xf0, 0xa2, 0x08, 0xf0, 0xeb, 0xf8],
    // in al,0x10; out 0x10,al; jmp
    &[0xe4, 0x10, 0xe6, 0x10, 0xeb, 0xfa],
    // sti; hlt; jmp
    &[0xfb, 0xf4, 0xeb, 0xfc],
    // rep outsb; jmp
    &[0xb9, 0x00, 0x10, 0xba, 0x10, 0x00, 0xf3, 0x6e, 0xeb, 0xf6],
    // lock inc byte [0x3000]; inc byte [0x800b]: changes the instruction's own displacement
    &[
        0xf0, 0xfe, 0x06, 0x00, 0x30, 0xfe, 0x06, 0x0b, 0x80, 0xeb, 0xf5,
    ],
    // mov eax,12; vmcall; jmp
    &[0x66, 0xb8, 12, 0, 0, 0, 0x0f, 0x01, 0xc1, 0xeb, 0xf5],
    // cli; hlt
    &[0xfa, 0xf4],
];

/// The errno that every call on a dead VM returns. A VM is dead after an SMI if no memslot contains SMRAM. A call that
/// panics also makes its VM dead, but ends its lane, too.
const DEAD: i32 = libc::EIO;

/// The page number of one more program, whose last instruction crosses into the next page.
const ACROSS: usize = PROGRAMS.len();

/// The page number and the code of the SMI handler, for the initial SMBASE. The code is `inc word [0x4000]; rsm`.
const SMI_HANDLER: (usize, &[u8]) = (0x38, &[0xff, 0x06, 0x00, 0x40, 0x0f, 0xaa]);

/// Returns a page of code that jumps to the page's last two bytes. The last two bytes are the first two bytes of `mov
/// ax, imm16`.
fn across() -> Vec<u8> {
    let mut page = vec![0x90; PAGE];
    page[..3].copy_from_slice(&[0xe9, 0xfb, 0x0f]);
    page[PAGE - 2..].copy_from_slice(&[0xb8, 0x34]);
    page
}

/// Carries out the stream that `bytes` describe (see the module's documentation).
pub fn ioctls(bytes: &[u8]) {
    static SIGNALS: Once = Once::new();
    // These calls, too, are made as the preload library makes them.
    SIGNALS.call_once(|| {
        slat_kvm::watch_signals();
        begin_irqfds();
    });
    watch::stream("ioctls", bytes, LANES, |stream| {
        let before = Before::a_stream();
        let world = World::new();
        for (page, code) in PROGRAMS.iter().enumerate() {
            world.ram.write(page, code);
        }
        world.ram.write(SMI_HANDLER.0, SMI_HANDLER.1);
        world.ram.write(ACROSS, &across());
        world.ram.write(ACROSS + 1, &[0x12, 0xeb, 0xfb]);
        let (setup, rest) = bytes.split_at(bytes.len().min(4));
        begin(&world, setup);
        let part = rest.len().div_ceil(LANES).max(1);
        std::thread::scope(|scope| {
            for (index, bytes) in rest.chunks(part).enumerate() {
                let (world, lane) = (&world, stream.lane(index));
                scope.spawn(move || Worker::new(world, lane, bytes).work());
            }
        });
        for vm in slat_kvm::notify::live() {
            vm.audit().expect("a quiet VM");
        }
        world.ram.check();
        drop(world);
        // slat's own threads may still hold an object for some time, so this waits.
        let begin = Instant::now();
        while !slat_kvm::notify::live().is_empty() {
            assert!(begin.elapsed() < SOON, "a VM outlived its descriptors");
            std::thread::yield_now();
        }
        before.check();
    });
}

/// Makes slat create the objects that the irqfds of all VMs have in common. slat never drops these objects.
fn begin_irqfds() {
    let world = World::new();
    let system = Object::system();
    let vm = system.ioctl(abi::KVM_CREATE_VM, 0).expect("a VM");
    world.adopt(vm);
    let mut rng = Rng::from_bytes(&[]);
    let vm = world.vms.pick(&mut rng).expect("it was made just now");
    let call = |request, argument| vm.object.ioctl(request, argument).map(drop);
    call(abi::KVM_CREATE_IRQCHIP, 0).expect("controllers");
    let irqfd = kvm_irqfd {
        fd: world.event(&mut rng) as u32,
        ..Default::default()
    };
    call(abi::KVM_IRQFD, &raw const irqfd as u64).expect("an irqfd");
}

/// Makes the first VM. In both address spaces it has a slot with the programs. It has one vCPU.
fn begin(world: &World, setup: &[u8]) {
    let mut rng = Rng::from_bytes(setup);
    let choices = rng.below(256);
    let system = Object::system();
    let created = system.ioctl(abi::KVM_CREATE_VM, choices & 1);
    world.adopt(created.expect("a VM"));
    let vm = world
        .vms
        .pick(&mut Rng::from_bytes(&[]))
        .expect("it was made just now");
    // Some options exclude each other, so such a request may be refused.
    let optional = |request, argument| {
        let _ = vm
            .object
            .ioctl(request, argument)
            .map(|answer| world.adopt(answer));
    };
    if choices & 2 != 0 {
        optional(abi::KVM_CREATE_IRQCHIP, 0);
    } else if choices & 0x40 != 0 {
        let mut split = kvm_enable_cap {
            cap: KVM_CAP_SPLIT_IRQCHIP,
            ..Default::default()
        };
        split.args[0] = 24;
        optional(abi::KVM_ENABLE_CAP, &raw const split as u64);
    }
    if choices & 0x20 != 0 {
        optional(abi::KVM_CREATE_PIT, 0);
    }
    if choices & 4 != 0 {
        let mut rings = kvm_enable_cap {
            cap: KVM_CAP_DIRTY_LOG_RING,
            ..Default::default()
        };
        rings.args[0] = 4096;
        optional(abi::KVM_ENABLE_CAP, &raw const rings as u64);
    }
    let pages = world.ram.pages(0, 64);
    let flags = if choices & 8 != 0 {
        KVM_MEM_LOG_DIRTY_PAGES
    } else {
        0
    };
    world.ram.give(pages.start as u64..pages.end as u64);
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags,
        guest_phys_addr: 0,
        memory_size: pages.len() as u64,
        userspace_addr: pages.start as u64,
    };
    optional(abi::KVM_SET_USER_MEMORY_REGION, &raw const region as u64);
    let in_smm = kvm_userspace_memory_region {
        slot: 1 << 16,
        ..region
    };
    optional(abi::KVM_SET_USER_MEMORY_REGION, &raw const in_smm as u64);
    for id in 0..=(choices >> 4 & 1) {
        optional(abi::KVM_CREATE_VCPU, id);
    }
}

/// A lane, which is one thread of a stream.
struct Worker<'a> {
    world: &'a World,
    lane: &'a Lane,
    rng: Rng,
    system: Object,
    buffer: Buffer,
    bitmaps: Buffer,
}

/// Returns the size in bytes of the structure to which a request's argument points.
fn size_of_argument(request: u32) -> u64 {
    match request {
        // All other requests with a structure have the structure's size in their number.
        abi::KVM_REINJECT_CONTROL => size_of::<kvm_reinject_control>() as u64,
        _ => u64::from(request >> 16 & 0x3fff),
    }
}

impl<'a> Worker<'a> {
    fn new(world: &'a World, lane: &'a Lane, bytes: &[u8]) -> Self {
        Worker {
            world,
            lane,
            rng: Rng::from_bytes(bytes),
            system: Object::system(),
            buffer: Buffer::new(),
            bitmaps: Buffer::new(),
        }
    }

    fn work(mut self) {
        self.lane.enter();
        while !self.rng.is_exhausted() {
            match self.rng.below(16) {
                0..=6 => self.request(),
                7..=8 => self.start(),
                9..=11 => self.run(),
                12..=13 => self.change_memory(),
                14 => match self.rng.below(2) {
                    0 => self.scribble(),
                    _ => self.world.signal(&mut self.rng),
                },
                _ => match self.rng.below(4) {
                    0 => self.unknown_request(),
                    1 => self.use_other(),
                    _ => self.close(),
                },
            }
        }
        self.lane.leave();
    }

    fn object(&mut self, on: On) -> Option<(Object, Option<std::sync::Arc<Handle>>)> {
        let handles = match on {
            On::System => return Some((self.system.clone(), None)),
            On::Vm => &self.world.vms,
            On::Vcpu => &self.world.vcpus,
        };
        let handle = handles.pick(&mut self.rng)?;
        Some((handle.object.clone(), Some(handle)))
    }

    fn request(&mut self) {
        let request = self.rng.pick(REQUESTS);
        if let Some((object, _held)) = self.object(request.on) {
            self.make(&object, request);
        }
    }

    /// Makes a request, and checks its result and the memory that it has written.
    fn make(&mut self, object: &Object, request: Request) {
        let mut bitmap = vec![0; self.rng.pick(&[8, 16, 40])];
        mutate(&mut self.rng, &mut bitmap);
        let bitmap = self.bitmaps.place(&mut self.rng, &bitmap);
        let context = Context {
            world: self.world,
            bitmap,
        };
        let mut bytes = match request.argument {
            Argument::Value(value) => {
                let argument = value(&mut self.rng);
                self.buffer.place(&mut self.rng, &[]);
                self.issue(object, request, argument, 0..0);
                return self.bitmaps.check("a call without pointer", 0..0);
            }
            Argument::Struct(make) => make(&mut self.rng, &context),
            Argument::Out(size) => vec![0xee; size],
            Argument::Back(get, size) => {
                let mut bytes = vec![0u8; size];
                let address = bytes.as_mut_ptr() as u64;
                self.lane.call(step("before", get, address), || {
                    object.ioctl(get, address).is_ok()
                });
                mutate(&mut self.rng, &mut bytes);
                bytes
            }
            Argument::Table { make, .. } => make(&mut self.rng),
        };
        if !matches!(request.argument, Argument::Out(_)) && self.rng.one_in(4) {
            to_an_edge(&mut self.rng, request.number, &mut bytes);
        }
        let address = self.buffer.place(&mut self.rng, &bytes);
        let read = request.number >> 31 != 0;
        let len = match request.argument {
            _ if !read => 0,
            Argument::Table { entries, step, .. } => {
                let count = self.buffer.word_at(address).unwrap_or(0);
                entries + u64::from(count) * step
            }
            _ => size_of_argument(request.number).max(bytes.len() as u64),
        };
        // If a list does not fit, the call writes only the list's real length.
        let len = if read { len.max(4) } else { len };
        self.issue(
            object,
            request,
            address,
            address..address.saturating_add(len),
        );
        let to_bitmap = match request.number {
            abi::KVM_GET_DIRTY_LOG => bitmap..u64::MAX,
            abi::KVM_GET_ONE_REG => bitmap..bitmap.saturating_add(8),
            _ => 0..0,
        };
        self.bitmaps.check("a call with a bitmap", to_bitmap);
    }

    /// Makes a request that may write only to `allowed`. If it returns `EFAULT`, that is a finding, unless the
    /// argument's address is bad.
    fn issue(&mut self, object: &Object, request: Request, argument: u64, allowed: Range<u64>) {
        let pointer_is_good = match request.argument {
            Argument::Struct(_) => self
                .buffer
                .is_open(argument, size_of_argument(request.number) as usize),
            Argument::Out(size) | Argument::Back(_, size) => self.buffer.is_open(argument, size),
            Argument::Value(_) | Argument::Table { .. } => false,
        };
        // The requests in `others` also access other memory than their argument.
        let others = [
            abi::KVM_GET_DIRTY_LOG,
            abi::KVM_CLEAR_DIRTY_LOG,
            abi::KVM_GET_ONE_REG,
            abi::KVM_SET_ONE_REG,
            abi::KVM_PRE_FAULT_MEMORY,
            abi::KVM_SET_SIGNAL_MASK,
        ];
        let name = abi::name(request.number).expect("a request of the table");
        let step = step(name, request.number, argument);
        let answer = self
            .lane
            .call(step, || object.ioctl(request.number, argument));
        match answer {
            Ok(answer) => {
                self.world.adopt(answer);
            }
            Err(error) if error.errno() == DEAD => {}
            Err(error) if request.errnos.contains(&error.errno()) => {
                let bad_pointer = error.errno() == libc::EFAULT;
                let excused = !pointer_is_good || others.contains(&request.number);
                assert!(
                    !bad_pointer || excused,
                    "{name} = EFAULT, but {argument:#x} is a good address"
                );
            }
            Err(error) => panic!("{name}({argument:#x}) = {error}"),
        }
        self.buffer.check(name, allowed);
    }

    /// Makes a request that does not exist, or an existing request with another size in its number.
    fn unknown_request(&mut self) {
        let on = self.rng.pick(&[On::System, On::Vm, On::Vcpu]);
        let known = self.rng.pick(REQUESTS);
        let number = match self.rng.below(3) {
            0 => known.number ^ 1 << (16 + self.rng.below(16)),
            1 => abi::KVMIO << 8 | self.rng.word() as u32,
            _ => known.number,
        };
        let is_known = REQUESTS
            .iter()
            .any(|request| request.number == number && request.on == on);
        if is_known || number == abi::KVM_RUN {
            return;
        }
        let Some((object, _held)) = self.object(on) else {
            return;
        };
        let address = self.buffer.place(&mut self.rng, &[0; 64]);
        let answer = self.lane.call(step("unknown", number, address), || {
            object.ioctl(number, address)
        });
        let errno = answer
            .map(drop)
            .expect_err("an unknown request was answered")
            .errno();
        // The errno that KVM on x86 returns for an unknown request.
        let refusal = match on {
            On::Vm => libc::ENOTTY,
            On::System | On::Vcpu => libc::EINVAL,
        };
        assert!(
            errno == refusal || errno == DEAD,
            "{on:?} {number:#x}: {errno}"
        );
        self.buffer.check("an unknown request", 0..0);
    }

    fn vcpu(&mut self) -> Option<std::sync::Arc<Handle>> {
        self.world.vcpus.pick(&mut self.rng)
    }

    /// Sets a vCPU to the start of one of the programs. The vCPU is then in real mode.
    fn start(&mut self) {
        let Some(vcpu) = self.vcpu() else { return };
        let mut sregs = kvm_sregs::default();
        let mut regs = kvm_regs::default();
        let program = self.rng.below(PROGRAMS.len() as u64 + 1);
        let started = self.lane.call(step("start", program as u32, 0), || {
            vcpu.object
                .ioctl(abi::KVM_GET_SREGS, &raw mut sregs as u64)?;
            sregs.cs.base = 0;
            sregs.cs.selector = 0;
            sregs.cr0 &= !1;
            let _ = vcpu
                .object
                .ioctl(abi::KVM_SET_SREGS, &raw const sregs as u64);
            (regs.rip, regs.rflags, regs.rsp) = (program * PAGE as u64, 2, 0xe000);
            vcpu.object
                .ioctl(abi::KVM_SET_REGS, &raw const regs as u64)
                .map(drop)
        });
        let refused = started.map_err(|error| error.errno());
        assert!(
            matches!(refused, Ok(()) | Err(DEAD)),
            "registers can be set: {refused:?}"
        );
    }

    fn run(&mut self) {
        let Some(vcpu) = self.vcpu() else { return };
        let length = Duration::from_micros(self.rng.pick(&[0, 20, 100, 500, 1500]));
        let kick = self.rng.pick(&[Kick::Signal, Kick::ExitAndSignal]);
        let argument = nothing_as_a_rule(&mut self.rng);
        if vcpu.runs.swap(true, Ordering::AcqRel) {
            return;
        }
        let mapped = vcpu.mapped.as_ref().expect("every vCPU is mapped");
        let slice = Slice {
            page: mapped.start(),
            length,
            kick,
            extra: Duration::ZERO,
        };
        let step = step("KVM_RUN", abi::KVM_RUN, argument);
        let answer = self
            .lane
            .run(step, slice, || vcpu.object.ioctl(abi::KVM_RUN, argument));
        let errnos = [libc::EINTR, libc::EAGAIN, libc::EINVAL, libc::EFAULT, DEAD];
        if let Err(error) = answer {
            assert!(errnos.contains(&error.errno()), "KVM_RUN = {error}");
        }
        vcpu.runs.store(false, Ordering::Release);
    }

    /// Calls mmap, munmap, madvise or mprotect for guest memory, with or without an invalidation around the call.
    fn change_memory(&mut self) {
        let first = self.rng.below(PAGES as u64) as usize;
        let count = (1 + self.rng.below(16) as usize).min(PAGES - first);
        let range = self.world.ram.pages(first, count);
        self.world.ram.give(range.start as u64..range.end as u64);
        let told = !self.rng.one_in(4);
        let kind = self.rng.below(10);
        let all = libc::PROT_READ | libc::PROT_WRITE;
        let change = || {
            // SAFETY: the memory belongs to the guest, and all accesses to it are guarded.
            unsafe {
                let (start, len) = (range.start as *mut libc::c_void, range.len());
                let advise = |advice| libc::madvise(start, len, advice) == 0;
                match kind {
                    0 => remap(range.clone(), all),
                    1 => remap(range.clone(), libc::PROT_NONE),
                    2 => remap(range.clone(), libc::PROT_READ),
                    3 => advise(libc::MADV_DONTNEED),
                    4 => advise(libc::MADV_HUGEPAGE),
                    5 => advise(libc::MADV_NOHUGEPAGE),
                    6 => libc::mprotect(start, len, libc::PROT_READ) == 0,
                    7 => libc::mprotect(start, len, libc::PROT_NONE) == 0,
                    8 => remap_beyond_file(range.clone()),
                    _ => libc::mprotect(start, len, all) == 0,
                }
            }
        };
        let tell = || match kind {
            0..=2 | 8 => mappings::changed(range.clone()),
            3 => {}
            4 => mappings::advised(range.clone(), HugePages::Wanted),
            5 => mappings::advised(range.clone(), HugePages::Unwanted),
            _ => mappings::protected(range.clone()),
        };
        let what = if told { "memory" } else { "memory, untold" };
        let step = Step {
            what,
            detail: [kind, range.start as u64],
        };
        self.lane.call(step, || match told {
            false => change(),
            true => slat_kvm::notify::around(range.clone(), || {
                let done = change();
                tell();
                done
            }),
        });
    }

    /// Writes to the memory that the client shares with a vCPU: `kvm_run`, the data of port I/O, the ring of coalesced
    /// MMIO, the dirty ring.
    fn scribble(&mut self) {
        let Some(vcpu) = self.vcpu() else { return };
        let range = vcpu.mapped.as_ref().expect("every vCPU is mapped").range();
        // Chooses among the mapped pages. In a mapping with a dirty ring, pages 3 to 63 are not mapped.
        let pages = range.len() / PAGE;
        let page = self.rng.pick(&[0, 0, 0, 2, 64, 65]).min(pages - 1);
        let offset = self.rng.below(PAGE as u64 / 4) as usize * 4;
        let offset = match self.rng.below(8) {
            0 => offset_of!(kvm_run, kvm_valid_regs),
            1 => offset_of!(kvm_run, kvm_dirty_regs),
            2 => offset_of!(kvm_run, request_interrupt_window) & !3,
            3 => offset_of!(kvm_run, s) + offset % size_of::<kvm_sync_regs>() / 4 * 4,
            4 => offset % 64,
            _ => offset,
        };
        let kicks = [
            offset_of!(kvm_run, flags) & !3,
            offset_of!(kvm_run, immediate_exit) & !3,
        ];
        if page == 0 && kicks.contains(&offset) {
            return;
        }
        let value = match self.rng.below(3) {
            0 => self.rng.word() as u32,
            1 => self.rng.below(8) as u32,
            _ => self.rng.pick(&BOUNDARIES) as u32,
        };
        // SAFETY: the address is in the mapping, which exists as long as the handle is held. All other users accept any
        // value there.
        unsafe { ((range.start + page * PAGE + offset) as *mut u32).write_volatile(value) };
    }

    /// Uses an object that is not a VM or vCPU: reads statistics, allocates or frees private memory, or asks a device
    /// for an attribute.
    fn use_other(&mut self) {
        let Some(other) = self.world.others.pick(&mut self.rng) else {
            return;
        };
        let (mode, page, pages) = (self.rng.below(4), self.rng.below(20), self.rng.below(8));
        let [offset, len] = [page, pages].map(|pages| pages as i64 * PAGE as i64);
        let step = step("use", mode as u32, offset as u64);
        let errno = self.lane.call(step, || match &other.object {
            Object::Stats(stats) => {
                stats.refresh();
                0
            }
            Object::GuestMemfd(memory) => match memory.fallocate(mode as i32, offset, len) {
                Ok(()) => 0,
                Err(error) => error.errno(),
            },
            Object::Device(device) => {
                let attribute = kvm_device_attr {
                    group: mode as u32,
                    attr: page,
                    ..Default::default()
                };
                match device.has_attribute(&attribute) {
                    Ok(()) => 0,
                    Err(error) => error.errno(),
                }
            }
            _ => unreachable!("{other:?}"),
        });
        assert!(
            [0, libc::EOPNOTSUPP, libc::EINVAL, libc::ENOMEM, libc::ENXIO].contains(&errno),
            "errno {errno}"
        );
    }

    fn close(&mut self) {
        let handles = match self.rng.below(4) {
            0 => &self.world.vms,
            1 | 2 => &self.world.vcpus,
            _ => &self.world.others,
        };
        let taken = handles.take(&mut self.rng);
        self.lane.call(
            Step {
                what: "close",
                detail: [0; 2],
            },
            || drop(taken),
        );
    }
}

fn nothing_as_a_rule(rng: &mut Rng) -> u64 {
    if rng.one_in(16) {
        rng.pick(&BOUNDARIES)
    } else {
        0
    }
}

fn step(what: &'static str, request: u32, argument: u64) -> Step {
    Step {
        what,
        detail: [request.into(), argument],
    }
}
