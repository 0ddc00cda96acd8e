//! Accesses to guest memory.
//!
//! Compiled code compares the page's entry in the TLB. If the entry matches, compiled code accesses the host's memory
//! itself. It calls a helper if the entry does not match: for pages that are not in the TLB, accesses to two pages,
//! misaligned accesses that need a check, and watched pages. If a guarded access or a helper fails, compiled code
//! leaves to the interpreter at the last checkpoint.
//!
//! # Order
//! A plain load or store of the guest becomes a plain one of the host: x86 orders these more strongly than Arm, and
//! arm64 orders them as the guest expects. A load-acquire becomes Cranelift's sequentially consistent load (LDAR on
//! arm64, a plain load on x86), and a store-release its sequentially consistent store (STLR; on x86 a store and
//! MFENCE). So a load-acquire never takes effect before an earlier store-release of its thread, as RCsc demands.
//! Helpers fence their ordered accesses on both sides. Memory barriers become full fences (DMB ISH, MFENCE). The tests
//! in `order` check this with models of both architectures.

use super::helpers::{Request, helper};
use super::translator::Translator;
use super::vectors::Vector;
use crate::abort::Right;
use crate::insn::Order;
use crate::tier::Access;
use crate::tlb;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I8X16, I16, I32, I64};
use cranelift_codegen::ir::{Block, BlockArg, InstBuilder, MemFlags, Type, Value};
use slat_jit::GUARDED;
use std::vec::Vec;

/// The integer types of Cranelift, by the logarithm of their bytes.
const TYPES: [Type; 4] = [I8, I16, I32, I64];

fn guarded() -> MemFlags {
    MemFlags::new().with_trap_code(Some(GUARDED))
}

impl Translator<'_> {
    /// Emits the look-up of an access of `bytes` bytes in the TLB. Code emitted next runs if the page is found with
    /// this right. Returns the host's address, and the block that runs if the look-up misses.
    fn look_up(
        &mut self,
        address: Value,
        bytes: i64,
        right: Right,
        access: Access,
    ) -> (Value, Block) {
        let table = tlb::table_offset(self.context.accessor(access.kind)) as i32;
        let v = &mut self.v;
        // The offset of the entry in its table in bytes: the entry's index times the size of an entry, 1 <<
        // `ENTRY_BITS`.
        let shift = tlb::PAGE_BITS - tlb::ENTRY_BITS;
        let index = v.b.ins().ushr_imm(address, i64::from(shift));
        let index =
            v.b.ins()
                .band_imm(index, tlb::INDEX_MASK << tlb::ENTRY_BITS);
        let entry = v.b.ins().iadd(self.tlb, index);
        let last = match bytes {
            1 => address,
            bytes => v.b.ins().iadd_imm(address, bytes - 1),
        };
        let wanted = v.b.ins().bor_imm(last, (1 << tlb::PAGE_BITS) - 1);
        let trusted = MemFlags::trusted();
        let found = (v.b.ins()).load(I64, trusted, entry, table + tlb::tag_offset(right) as i32);
        let hits = v.b.ins().icmp(IntCC::Equal, wanted, found);
        let (hit, miss) = (v.b.create_block(), v.b.create_block());
        v.b.set_cold_block(miss);
        v.b.ins().brif(hits, hit, &[], miss, &[]);
        v.b.seal_block(hit);
        v.b.seal_block(miss);
        v.b.switch_to_block(hit);
        let addend = (v.b.ins()).load(I64, trusted, entry, table + tlb::ADDEND_OFFSET as i32);
        (v.b.ins().iadd(address, addend), miss)
    }

    /// Emits an access: what `quickly` emits runs if the TLB has the page, and what `slowly` emits runs if not. Code
    /// emitted next runs after both. `quickly` gets the host's address, and returns the results. `slowly` returns as
    /// many results, and a value that tells whether it has failed.
    fn access(
        &mut self,
        address: Value,
        (bytes, right, access): (i64, Right, Access),
        quickly: impl FnOnce(&mut Self, Value) -> Vec<Value>,
        slowly: impl FnOnce(&mut Self) -> (Vec<Value>, Value),
    ) -> Vec<Value> {
        let arguments = |values: &[Value]| -> Vec<BlockArg> {
            values.iter().map(|value| (*value).into()).collect()
        };
        if !self.context.is_direct {
            let (results, failed) = slowly(self);
            self.leave_if(failed);
            return results;
        }
        let (host, miss) = self.look_up(address, bytes, right, access);
        let hit = quickly(self, host);
        let done = self.v.b.create_block();
        let results = hit.iter().map(|value| {
            let ty = self.v.b.func.dfg.value_type(*value);
            self.v.b.append_block_param(done, ty)
        });
        let results: Vec<_> = results.collect();
        self.v.b.ins().jump(done, &arguments(&hit));
        self.v.b.switch_to_block(miss);
        let (missed, failed) = slowly(self);
        let leave = self.leave();
        (self.v.b.ins()).brif(failed, leave, &[], done, &arguments(&missed));
        self.v.b.seal_block(done);
        self.v.b.switch_to_block(done);
        results
    }

    /// Loads 1 << `size` bytes, at most 8, from the host's memory, zero-extended.
    fn load_word(&mut self, host: Value, size: u8, order: Order) -> Value {
        let b = &mut self.v.b;
        let ty = TYPES[usize::from(size)];
        if order.acquire {
            let value = b.ins().atomic_load(ty, guarded(), host);
            return match size {
                3 => value,
                _ => b.ins().uextend(I64, value),
            };
        }
        match size {
            0 => b.ins().uload8(I64, guarded(), host, 0),
            1 => b.ins().uload16(I64, guarded(), host, 0),
            2 => b.ins().uload32(guarded(), host, 0),
            _ => b.ins().load(I64, guarded(), host, 0),
        }
    }

    fn store_word(&mut self, host: Value, size: u8, value: Value, order: Order) {
        let b = &mut self.v.b;
        let value = match size {
            3 => value,
            _ => b.ins().ireduce(TYPES[usize::from(size)], value),
        };
        match order.release {
            true => b.ins().atomic_store(guarded(), value, host),
            false => b.ins().store(guarded(), value, host, 0),
        };
    }

    /// Calls the helper that loads. Returns the loaded value, and whether the helper has failed.
    fn call_load(&mut self, address: Value, size: u8, access: Access) -> [Value; 2] {
        let request = self.v.constant(Request::new(access, size).bits());
        let (helper, ty) = match size {
            4 => (helper!(load_vector), I8X16),
            _ => (helper!(load), I64),
        };
        let failed = self.v.call(helper, &[address, request], 1)[0];
        [self.result(ty), failed]
    }

    /// Calls the helper that stores. Returns whether the helper has failed.
    fn call_store(&mut self, address: Value, size: u8, value: Value, access: Access) -> Value {
        let request = self.v.constant(Request::new(access, size).bits());
        if size == 4 {
            self.give(&[Vector::Whole(value)]);
            return self.v.call(helper!(store_vector), &[address, request], 1)[0];
        }
        self.v.call(helper!(store), &[address, value, request], 1)[0]
    }

    /// Loads 1 << `size` bytes from the host's memory: 16 as a vector, fewer zero-extended.
    fn load_from_host(&mut self, host: Value, size: u8, order: Order) -> Value {
        match size {
            4 => (self.v.b.ins()).load(I8X16, guarded(), host, 0),
            _ => self.load_word(host, size, order),
        }
    }

    fn store_to_host(&mut self, host: Value, size: u8, value: Value, order: Order) {
        match size {
            4 => {
                self.v.b.ins().store(guarded(), value, host, 0);
            }
            _ => self.store_word(host, size, value, order),
        }
    }

    pub(super) fn load_at(&mut self, address: Value, size: u8, access: Access) -> Value {
        let found = self.access(
            address,
            (1 << size, Right::Read, access),
            |t, host| [t.load_from_host(host, size, access.order)].to_vec(),
            |t| {
                let [value, failed] = t.call_load(address, size, access);
                ([value].to_vec(), failed)
            },
        );
        found[0]
    }

    pub(super) fn store_at(&mut self, address: Value, size: u8, value: Value, access: Access) {
        self.access(
            address,
            (1 << size, Right::Write, access),
            |t, host| {
                t.store_to_host(host, size, value, access.order);
                Vec::new()
            },
            |t| (Vec::new(), t.call_store(address, size, value, access)),
        );
    }

    /// Loads two adjacent values. If both are in one page, one look-up in the TLB finds them.
    pub(super) fn load_pair_at(&mut self, address: Value, size: u8, access: Access) -> [Value; 2] {
        let distance = 1 << size;
        let found = self.access(
            address,
            (2 * distance, Right::Read, access),
            |t, host| {
                let second = t.v.b.ins().iadd_imm(host, distance);
                [host, second]
                    .map(|host| t.load_from_host(host, size, access.order))
                    .to_vec()
            },
            |t| {
                let [first, failed] = t.call_load(address, size, access);
                t.leave_if(failed);
                let address = t.v.b.ins().iadd_imm(address, distance);
                let [second, failed] = t.call_load(address, size, access);
                ([first, second].to_vec(), failed)
            },
        );
        [found[0], found[1]]
    }

    /// Stores two adjacent values. If both are in one page, one look-up in the TLB finds them.
    pub(super) fn store_pair_at(
        &mut self,
        address: Value,
        size: u8,
        parts: [Value; 2],
        access: Access,
    ) {
        let distance = 1 << size;
        self.access(
            address,
            (2 * distance, Right::Write, access),
            |t, host| {
                let second = t.v.b.ins().iadd_imm(host, distance);
                for (host, part) in [host, second].into_iter().zip(parts) {
                    t.store_to_host(host, size, part, access.order);
                }
                Vec::new()
            },
            |t| {
                let each = Access {
                    element: Some(size),
                    ..access
                };
                let failed = t.call_prepare(address, 2 << size, each);
                t.leave_if(failed);
                let failed = t.call_store(address, size, parts[0], access);
                t.leave_if(failed);
                let address = t.v.b.ins().iadd_imm(address, distance);
                (Vec::new(), t.call_store(address, size, parts[1], access))
            },
        );
    }

    /// Calls the helper that checks whether stores to `bytes` bytes will succeed. Returns whether they will fail.
    fn call_prepare(&mut self, address: Value, bytes: u32, access: Access) -> Value {
        let request = Request {
            bytes,
            ..Request::new(access, 0)
        };
        let request = self.v.constant(request.bits());
        self.v.call(helper!(prepare_stores), &[address, request], 1)[0]
    }

    pub(super) fn prepare_stores_at(&mut self, address: Value, bytes: u32, access: Access) {
        self.access(
            address,
            (bytes.into(), Right::Write, access),
            |_, _| Vec::new(),
            |t| (Vec::new(), t.call_prepare(address, bytes, access)),
        );
    }
}
