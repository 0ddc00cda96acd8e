//! Compiles random functions with this tier and with Cranelift, and checks that both have the same results. The
//! functions use all instructions that this tier knows.

use super::{Room, generate};
use crate::jit::dispatch::dispatch;
use crate::jit::window::BASE;
use crate::jit::{Compiler, entries, translate};
use cranelift_codegen::Context;
use cranelift_codegen::control::ControlPlane;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I16, I32, I64};
use cranelift_codegen::ir::{
    AbiParam, Block, BlockArg, BlockCall, Function, InstBuilder, JumpTableData, MemFlags,
    Signature, SourceLoc, Type, Value,
};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use iced_x86::{Decoder, DecoderOptions, Mnemonic, OpKind, Register};
use slat_jit::Chunk;
use std::arch::naked_asm;

const TYPES: [Type; 4] = [I8, I16, I32, I64];
/// The number of words of memory that a function uses.
const WORDS: usize = 24;
/// The number of blocks at which a function can be entered.
const ENTRIES: usize = 2;
/// The number of functions, unless the environment variable `SLAT_FUNCTIONS` sets another number.
const FUNCTIONS: u64 = 1500;

/// A function for the tests' code to call. Returns a number that depends on its arguments, and overwrites all registers
/// that a function need not preserve.
#[unsafe(naked)]
unsafe extern "C" fn scramble(memory: *mut u64, value: u64) -> u64 {
    naked_asm!(
        "mov rax, [rdi]",
        "imul rax, rsi, 77",
        "add rax, [rdi + 8]",
        "mov rcx, -1",
        "mov rdx, -2",
        "mov rsi, -3",
        "mov rdi, -4",
        "mov r8, -5",
        "mov r9, -6",
        "mov r10, -7",
        "mov r11, -8",
        "ret",
    )
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.0 ^ self.0 >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd) >> 3
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

struct Maker<'a, 'r> {
    b: FunctionBuilder<'a>,
    rng: &'r mut Random,
    memory: Value,
    values: Vec<Value>,
}

impl Maker<'_, '_> {
    fn ty(&self, value: Value) -> Type {
        self.b.func.dfg.value_type(value)
    }

    /// Returns a value of type `ty`, usually an existing value.
    fn value(&mut self, ty: Type) -> Value {
        let fitting: Vec<Value> = (self.values.iter().copied())
            .filter(|&value| self.ty(value) == ty)
            .collect();
        if !fitting.is_empty() && self.rng.below(8) != 0 {
            return self.rng.pick(&fitting);
        }
        if self.rng.below(3) == 0 {
            let bits = ty.bits();
            let value = self.rng.pick(&[0, 1, 0x7f, 0xff, self.rng.0]);
            let value = if bits == 64 {
                value
            } else {
                value & ((1 << bits) - 1)
            };
            return self.b.ins().iconst(ty, value as i64);
        }
        let offset = 8 * self.rng.below(WORDS as u64) as i32;
        (self.b.ins()).load(ty, MemFlags::trusted(), self.memory, offset)
    }

    fn condition(&mut self) -> Value {
        use IntCC::*;
        let ty = self.rng.pick(&TYPES);
        let (a, b) = (self.value(ty), self.value(ty));
        let cc = self.rng.pick(&[
            Equal,
            NotEqual,
            SignedLessThan,
            SignedGreaterThanOrEqual,
            SignedGreaterThan,
            SignedLessThanOrEqual,
            UnsignedLessThan,
            UnsignedGreaterThanOrEqual,
            UnsignedGreaterThan,
            UnsignedLessThanOrEqual,
        ]);
        match self.rng.below(4) {
            0 => {
                let immediate = self.rng.below(256) as i64 - 128;
                self.b.ins().icmp_imm(cc, a, immediate)
            }
            1 => {
                let (offset, trusted) = (self.word(), MemFlags::trusted());
                let b = self.b.ins().load(ty, trusted, self.memory, offset);
                self.b.ins().icmp(cc, a, b)
            }
            _ => self.b.ins().icmp(cc, a, b),
        }
    }

    fn compute(&mut self) -> Value {
        let ty = self.rng.pick(&TYPES);
        let (a, b) = (self.value(ty), self.value(ty));
        let immediate = self.rng.below(300) as i64 - 150;
        let wide = ty.bits() >= 32;
        let choice = self.rng.below(36);
        let other = self.rng.pick(&TYPES);
        let condition = (choice == 20).then(|| self.condition());
        let ins = self.b.ins();
        match choice {
            0 => ins.iadd(a, b),
            1 => ins.isub(a, b),
            2 => ins.band(a, b),
            3 => ins.bor(a, b),
            4 => ins.bxor(a, b),
            5 => ins.band_not(a, b),
            6 => ins.imul(a, b),
            7 => ins.ishl(a, b),
            8 => ins.ushr(a, b),
            9 => ins.sshr(a, b),
            10 => ins.iadd_imm(a, immediate),
            11 => ins.band_imm(a, immediate),
            12 => ins.bxor_imm(a, immediate),
            13 => ins.ishl_imm(a, immediate & i64::from(ty.bits() - 1)),
            14 => ins.ushr_imm(a, immediate & i64::from(ty.bits() - 1)),
            15 => ins.sshr_imm(a, immediate & i64::from(ty.bits() - 1)),
            16 => ins.rotl_imm(a, immediate & i64::from(ty.bits() - 1)),
            17 => ins.ineg(a),
            18 => ins.bnot(a),
            19 => self.condition(),
            20 => match condition {
                Some(condition) => ins.select(condition, a, b),
                None => a,
            },
            21 if wide => ins.iabs(a),
            22 if ty != I8 => ins.bswap(a),
            23 if wide => ins.umulhi(a, b),
            24 if wide => ins.smulhi(a, b),
            25 if wide => {
                let divisor = self.b.ins().bor_imm(b, 1);
                self.b.ins().udiv(a, divisor)
            }
            26 if ty != I8 && is_x86_feature_detected!("bmi1") => ins.ctz(a),
            27 if ty != I8 && is_x86_feature_detected!("popcnt") => ins.popcnt(a),
            30 if ty != I8 && is_x86_feature_detected!("lzcnt") => ins.clz(a),
            31 => ins.rotr_imm(a, immediate & i64::from(ty.bits() - 1)),
            32 => ins.rotl(a, b),
            33 => ins.rotr(a, b),
            34 => self.guarded_load(ty),
            35 => self.compare_exchange(a, b),
            _ if other.bits() > ty.bits() && choice.is_multiple_of(2) => ins.uextend(other, a),
            _ if other.bits() > ty.bits() => ins.sextend(other, a),
            _ if other.bits() < ty.bits() => ins.ireduce(other, a),
            _ => ins.bor(a, b),
        }
    }

    /// Returns the address of a word, and the flags of a guarded access.
    fn guarded(&mut self) -> (Value, MemFlags) {
        let offset = self.word();
        let address = self.b.ins().iadd_imm(self.memory, i64::from(offset));
        let flags = MemFlags::trusted().with_trap_code(Some(slat_jit::GUARDED));
        (address, flags)
    }

    fn guarded_load(&mut self, ty: Type) -> Value {
        let (address, flags) = self.guarded();
        let one = self.value(ty);
        let zero = self.b.ins().iconst(ty, 0);
        let value = self.b.ins().load(ty, flags, address, 0);
        match self.rng.below(3) {
            // The result is either compared at once, or not used.
            0 => {
                let more = self.b.ins().icmp(IntCC::UnsignedLessThan, one, value);
                self.b.ins().select(more, one, zero)
            }
            1 => one,
            _ => value,
        }
    }

    fn compare_exchange(&mut self, old: Value, new: Value) -> Value {
        let (address, flags) = self.guarded();
        // Often the expected value equals the word in memory.
        let (ty, trusted) = (self.ty(old), MemFlags::trusted());
        let now = self.b.ins().load(ty, trusted, address, 0);
        let old = self.rng.pick(&[old, now]);
        self.b.ins().atomic_cas(flags, address, old, new)
    }

    fn store(&mut self) {
        let ty = self.rng.pick(&TYPES);
        let (offset, trusted) = (self.word(), MemFlags::trusted());
        let value = match self.rng.below(3) {
            0 => {
                // Store the result to the word that was loaded, or to another word.
                let from = [offset, self.word()][self.rng.below(2) as usize];
                let small = self.rng.below(1000) as i64 - 500;
                let number = match ty {
                    I64 => self
                        .rng
                        .pick(&[small, small << 32, i64::from(i32::MAX) + 1]),
                    _ => small,
                };
                let old = self.b.ins().load(ty, trusted, self.memory, from);
                self.b.ins().iadd_imm(old, number)
            }
            _ => self.value(ty),
        };
        if self.rng.below(4) == 0 {
            let (address, flags) = self.guarded();
            self.b.ins().store(flags, value, address, 0);
        }
        (self.b.ins()).store(trusted, value, self.memory, offset);
        if self.rng.below(4) == 0 {
            self.values.push(value);
        }
    }

    /// Returns the offset of a random word.
    fn word(&mut self) -> i32 {
        8 * self.rng.below(WORDS as u64) as i32
    }

    fn call(&mut self) -> Value {
        let mut signature = Signature::new(CallConv::SystemV);
        signature.params = vec![AbiParam::new(I64); 2];
        signature.returns = vec![AbiParam::new(I64)];
        let signature = self.b.import_signature(signature);
        let function = (self.b.ins()).iconst(I64, scramble as *const () as i64);
        let value = self.value(I64);
        let call = (self.b.ins()).call_indirect(signature, function, &[self.memory, value]);
        self.b.inst_results(call)[0]
    }

    /// Emits a few instructions whose results only these instructions use.
    fn some(&mut self, count: u64) {
        let known = self.values.len();
        for _ in 0..self.rng.below(count) {
            let value = self.compute();
            self.values.push(value);
        }
        if self.rng.below(2) == 0 {
            self.store();
        }
        self.values.truncate(known);
    }

    /// Emits a conditional branch to two blocks, both of which then jump to the same block. One of the two may be rare
    /// and call a function.
    fn fork(&mut self) -> Value {
        let ty = self.rng.pick(&TYPES);
        let condition = self.condition();
        let (side, on) = (self.b.create_block(), self.b.create_block());
        let result = self.b.append_block_param(on, I64);
        let extra = self.b.append_block_param(on, ty);
        let is_rare = self.rng.below(2) == 0;
        if is_rare {
            self.b.set_cold_block(side);
        }
        let (given, more) = (self.value(I64), self.value(ty));
        if self.rng.below(3) == 0 {
            // The first block also calls a function. So some values are in slots after the first block, and in
            // registers after the second block.
            let first = self.b.create_block();
            self.b.ins().brif(condition, first, &[], side, &[]);
            self.b.switch_to_block(first);
            let known = self.values.len();
            self.some(3);
            let given = self.call();
            self.values.truncate(known);
            self.b.ins().jump(on, &[given.into(), more.into()]);
        } else {
            self.b
                .ins()
                .brif(condition, on, &[given.into(), more.into()], side, &[]);
        }
        self.b.switch_to_block(side);
        // Emit an instruction of this kind rarely, because the tier refuses to compile some of these instructions.
        if self.rng.below(64) == 0 {
            let known = self.values.len();
            self.fork();
            self.values.truncate(known);
        }
        self.some(4);
        let given = match is_rare || self.rng.below(2) == 0 {
            true => self.call(),
            false => self.value(I64),
        };
        let known = self.values.len();
        self.some(3);
        self.values.truncate(known);
        let more = self.value(ty);
        self.b.ins().jump(on, &[given.into(), more.into()]);
        self.b.switch_to_block(on);
        self.values.push(extra);
        result
    }

    /// Emits a loop with a few iterations, which uses values from before the loop.
    fn repeat(&mut self) -> Value {
        let zero = self.b.ins().iconst(I64, 0);
        let start = self.value(I64);
        let (turn, on) = (self.b.create_block(), self.b.create_block());
        let count = self.b.append_block_param(turn, I64);
        let sum = self.b.append_block_param(turn, I64);
        // The loop exchanges these values at each iteration.
        let circle = [(); 4].map(|()| self.value(I64));
        let mut begin = vec![BlockArg::from(zero), start.into()];
        begin.extend(circle.map(BlockArg::from));
        let circle = circle.map(|_| self.b.append_block_param(turn, I64));
        self.b.ins().jump(turn, &begin);
        self.b.switch_to_block(turn);
        let outer = self.value(I64);
        let known = self.values.len();
        self.values.push(sum);
        self.some(5);
        if self.rng.below(3) == 0 {
            let value = self.fork();
            self.values.push(value);
        }
        let more = self.value(I64);
        let next = self.b.ins().iadd(sum, outer);
        let next = self.b.ins().bxor(next, more);
        let product = self.b.ins().imul(next, circle[0]);
        let next = self.b.ins().iadd(product, circle[1]);
        let count = self.b.ins().iadd_imm(count, 1);
        let goes_on = (self.b.ins()).icmp_imm(IntCC::UnsignedLessThan, count, 3);
        self.values.truncate(known);
        let mut again = vec![BlockArg::from(count), next.into()];
        let by = 1 + self.rng.below(3) as usize;
        again.extend((0..4).map(|k| BlockArg::from(circle[(k + by) % 4])));
        self.b.ins().brif(goes_on, turn, &again, on, &[]);
        self.b.switch_to_block(on);
        next
    }

    fn head(&mut self, index: usize, block: Block, leave: Block) {
        self.b.switch_to_block(block);
        self.b.set_srcloc(entries::begins(index));
        self.memory = self.b.ins().get_pinned_reg(I64);
        self.b.set_srcloc(SourceLoc::default());
        self.values.clear();
        // Rarely, use more values than there are slots.
        let many = if self.rng.below(96) == 0 { 150 } else { 0 };
        let many: Vec<Value> = (0..many)
            .map(|k| {
                let trusted = MemFlags::trusted();
                let word = (self.b.ins()).load(I64, trusted, self.memory, 8 * (k % WORDS as i32));
                self.b.ins().iadd_imm(word, i64::from(k))
            })
            .collect();
        for _ in 0..5 + self.rng.below(30) {
            let value = match self.rng.below(12) {
                0 => self.fork(),
                1 => self.repeat(),
                2 => self.call(),
                3 => {
                    self.store();
                    continue;
                }
                _ => self.compute(),
            };
            self.values.push(value);
        }
        for (word, value) in std::mem::take(&mut self.values)
            .into_iter()
            .take(WORDS)
            .enumerate()
        {
            let offset = 8 * word as i32;
            (self.b.ins()).store(MemFlags::trusted(), value, self.memory, offset);
        }
        // Make the result large: a small return value would be a status instead of an address of code.
        let mut result = self.value(I64);
        for (value, by) in many.into_iter().zip(1..) {
            let turned = self.b.ins().rotl_imm(value, by & 63);
            result = self.b.ins().bxor(result, turned);
        }
        let result = self.b.ins().bor_imm(result, i64::MIN);
        self.b.ins().jump(leave, &[result.into()]);
    }
}

fn make(context: &mut Context, room: &mut FunctionBuilderContext, rng: &mut Random) {
    context.clear();
    context.func.signature = translate::region();
    let mut b = FunctionBuilder::new(&mut context.func, room);
    let entry = b.create_block();
    let index = b.append_block_param(entry, I64);
    let leave = b.create_block();
    let heads = [0; ENTRIES].map(|_| b.create_block());
    b.switch_to_block(entry);
    let index = b.ins().ireduce(I32, index);
    let calls = heads.map(|head| BlockCall::new(head, [], &mut b.func.dfg.value_lists));
    let table = b.create_jump_table(JumpTableData::new(calls[0], &calls));
    b.ins().br_table(index, table);
    let mut maker = Maker {
        b,
        rng,
        memory: index,
        values: Vec::new(),
    };
    for (index, head) in heads.into_iter().enumerate() {
        maker.head(index, head, leave);
    }
    let mut b = maker.b;
    let result = b.append_block_param(leave, I64);
    b.switch_to_block(leave);
    b.ins().return_(&[result]);
    b.seal_all_blocks();
    b.finalize();
}

/// Checks that each guarded access is in the code, and is recorded at the address of its instruction: a signal handler
/// looks for this address.
fn check_guarded(func: &Function, code: &[u8], guarded: &[(u32, u32)], seed: u64) {
    let insts = func.layout.blocks();
    let insts = insts.flat_map(|block| func.layout.block_insts(block));
    let flags = insts.filter_map(|inst| func.dfg.insts[inst].memflags());
    let expected = flags.filter(|flags| flags.trap_code() == Some(slat_jit::GUARDED));
    assert_eq!(guarded.len(), expected.count(), "function {seed}");
    for &(at, _) in guarded {
        let mut decoder = Decoder::new(64, &code[at as usize..], DecoderOptions::NONE);
        let insn = decoder.decode();
        // An access based on RBP is an access to a slot, and not guarded.
        let is_access = (0..insn.op_count()).any(|k| insn.op_kind(k) == OpKind::Memory)
            && insn.mnemonic() != Mnemonic::Lea
            && insn.memory_base() != Register::RBP;
        assert!(is_access, "function {seed}, at {at:#x}: {insn:?}");
    }
}

#[test]
fn random_functions_do_what_cranelifts_code_does() {
    let compiler = Compiler::with(1 << 20).unwrap();
    let (mut context, mut builder) = (Context::new(), FunctionBuilderContext::new());
    let mut room = Room::default();
    let mut made = 0;
    let functions = std::env::var("SLAT_FUNCTIONS").ok();
    let functions = functions.map_or(FUNCTIONS, |functions| functions.parse().unwrap());
    for seed in 0..functions {
        let mut rng = Random(seed << 20 | 1);
        make(&mut context, &mut builder, &mut rng);
        let text = context.func.display().to_string();
        let Some(code) = generate(&context.func, &mut room) else {
            continue;
        };
        made += 1;
        check_guarded(&context.func, code.bytes, code.guarded, seed);
        let offsets = code.entries;
        let baseline = compiler.arena.put(code.bytes, [].into_iter()).unwrap();
        context
            .compile(&*compiler.isa, &mut ControlPlane::default())
            .unwrap();
        let code = context.compiled_code().unwrap();
        let Ok(full_offsets) = entries::of(code, ENTRIES) else {
            continue;
        };
        let full = { compiler.arena.put(code.code_buffer(), [].into_iter()) }.unwrap();
        for (entry, (offset, full_offset)) in offsets.into_iter().zip(full_offsets).enumerate() {
            let before: [u64; WORDS] = std::array::from_fn(|_| rng.next() >> rng.below(64));
            let run = |chunk: &Chunk, offset: u32| {
                let code = chunk.start().wrapping_add(offset as usize);
                let mut memory = before;
                let cpu = memory.as_mut_ptr().wrapping_byte_sub(BASE).cast();
                // SAFETY: the function was just made. It accesses only its own frame and these words, which are used as
                // a CPU at R15.
                let result = unsafe { dispatch(cpu, code) };
                (result, memory)
            };
            let expected = run(&full, full_offset.expect("each path is entered"));
            let found = run(&baseline, offset);
            assert_eq!(found, expected, "function {seed}, entry {entry}:\n{text}");
        }
    }
    assert!(made > functions * 9 / 10, "{made} of {functions} were made");
}
