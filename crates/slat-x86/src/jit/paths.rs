//! Finds the paths of a region: sequences of blocks in which the guest's registers and flags stay in SSA values.
//!
//! At the beginning and at the end of a path, all state is in the `Cpu`. Between the blocks of a path, the code does
//! not write back values that the next block overwrites, does not read values again, and does not record flags that no
//! instruction reads.
//!
//! After a branch, a path continues at both targets, so a path is a tree of *nodes*. If several blocks of the path lead
//! to a block, the tree has a node for each of them. A path also continues at the target of a CALL, and after the
//! matching RET if the CALL is in the path. A path ends before a block to which a branch leads back, because a loop is
//! a path of its own. It also ends before a block that would make the path too long.
//!
//! A region can be entered at the beginnings of its paths: at its first block, at loops, at functions that CALLs call,
//! at the return addresses of CALLs, and where other paths end. If the CPU continues at another address, for example
//! after an interrupt, code of the baseline tier or the interpreter runs until the next jump.

use super::guest::Guest;
use super::{Source, Step, Tier};
use iced_x86::{FlowControl, Mnemonic};
use std::collections::{HashMap, VecDeque};

/// The greatest number of nodes of a path. The next constant is the greatest number of nodes of all paths of a region;
/// a path may still have a first node when it is reached.
const NODES: usize = 16;
const ALL_NODES: usize = 64;
/// The greatest number of instructions from the beginning of a path to the end of one of its nodes.
const INSTRUCTIONS: usize = 192;

/// A node: a block at one position in a path.
pub(super) struct Node {
    /// The block's index in the region.
    pub(super) block: usize,
    /// The index of the step of the block's first instruction.
    pub(super) step: usize,
    /// Whether the path leads from this node back to its beginning, directly or through further nodes.
    pub(super) turns: bool,
    /// The first node of the path.
    root: usize,
    /// The node before this node in the path.
    parent: Option<usize>,
    /// The number of the path's instructions before this node.
    before: usize,
    /// The nodes that can follow this node, each with its guest address.
    next: Vec<(u64, usize)>,
    /// The return addresses that are on the stack when this node begins: CALLs of the path have pushed them, and no RET
    /// has popped them yet.
    calls: Vec<u64>,
}

/// The paths of a region.
pub(super) struct Paths<'a> {
    source: &'a Source,
    blocks: &'a [Vec<Guest>],
    by_rip: HashMap<u64, usize>,
    /// For each block, the first node of the path that begins with it, if there is one.
    pub(super) roots: Vec<Option<usize>>,
    pub(super) nodes: Vec<Node>,
}

impl<'a> Paths<'a> {
    /// Finds the paths of a region whose decoded blocks are `blocks`. Also returns the steps of all nodes.
    pub(super) fn new(
        source: &'a Source,
        blocks: &'a [Vec<Guest>],
        tier: Tier,
    ) -> (Self, Box<[Step]>) {
        let rips = source.blocks.iter().map(|(rip, _)| *rip);
        let mut paths = Self {
            source,
            blocks,
            by_rip: rips.zip(0..).collect(),
            roots: vec![None; blocks.len()],
            nodes: Vec::new(),
        };
        match tier {
            Tier::Baseline => (0..blocks.len()).for_each(|block| _ = paths.grow(block, 1, &[])),
            Tier::Full => paths.grow_all(),
        }
        let steps = paths.lay_out();
        (paths, steps)
    }

    /// Returns the node at which the path continues after `node` if RIP is `rip`. `None`: the path does not continue.
    pub(super) fn next(&self, node: usize, rip: u64) -> Option<usize> {
        let mut next = self.nodes[node].next.iter();
        next.find(|(at, _)| *at == rip).map(|(_, node)| *node)
    }

    /// Returns the address at which the path continues after the RET at the end of a node. `None`: the path ends with
    /// the RET.
    pub(super) fn back(&self, node: usize) -> Option<u64> {
        let back = *self.nodes[node].calls.last()?;
        self.next(node, back).map(|_| back)
    }

    /// Returns the instructions that one iteration of the loop that begins at node `root` can execute.
    pub(super) fn turning(&self, root: usize) -> impl Iterator<Item = &'a Guest> {
        let nodes = self
            .nodes
            .iter()
            .filter(move |node| node.turns && node.root == root);
        nodes.flat_map(|node| &self.blocks[node.block])
    }

    fn add(&mut self, block: usize, parent: Option<usize>, calls: Vec<u64>) -> usize {
        let node = self.nodes.len();
        let above = parent.map(|parent| &self.nodes[parent]);
        self.nodes.push(Node {
            block,
            step: 0,
            turns: false,
            root: above.map_or(node, |above| above.root),
            parent,
            before: above.map_or(0, |above| above.before + self.blocks[above.block].len()),
            next: Vec::new(),
            calls,
        });
        node
    }

    /// Returns the addresses at which a path may continue after a block, each with the return addresses that are then
    /// on the stack.
    fn after(&self, block: usize, calls: &[u64]) -> Vec<(u64, Vec<u64>)> {
        let Guest { insn, .. } = self.blocks[block].last().expect("an instruction");
        let (target, next) = (insn.near_branch_target(), insn.next_ip());
        match insn.flow_control() {
            FlowControl::ConditionalBranch => {
                vec![(target, calls.to_vec()), (next, calls.to_vec())]
            }
            FlowControl::UnconditionalBranch => vec![(target, calls.to_vec())],
            FlowControl::Next => vec![(next, calls.to_vec())],
            FlowControl::Call => vec![(target, [calls, &[next]].concat())],
            FlowControl::Return if insn.mnemonic() == Mnemonic::Ret => match calls.split_last() {
                Some((back, calls)) => vec![(*back, calls.to_vec())],
                None => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    /// Returns, for each block, whether a branch other than CALL leads back to it.
    fn loops(&self) -> Vec<bool> {
        let mut loops = vec![false; self.blocks.len()];
        for (block, (rip, _)) in self.source.blocks.iter().enumerate() {
            for (target, calls) in self.after(block, &[]) {
                let to = self.by_rip.get(&target).filter(|_| calls.is_empty());
                if let Some(&to) = to.filter(|_| target <= *rip) {
                    loops[to] = true;
                }
            }
        }
        loops
    }

    /// Grows a path from each block at which the region is likely to be entered, and from each block before which
    /// another path ends.
    fn grow_all(&mut self) {
        let loops = self.loops();
        let mut is_root = loops.clone();
        is_root[0] = true;
        for guests in self.blocks {
            let Guest { insn, .. } = guests.last().expect("an instruction");
            let is_call = matches!(
                insn.flow_control(),
                FlowControl::Call | FlowControl::IndirectCall
            );
            for rip in [insn.next_ip(), insn.near_branch_target()] {
                if let Some(&block) = self.by_rip.get(&rip).filter(|_| is_call) {
                    is_root[block] = true;
                }
            }
        }
        while let Some(block) =
            (0..is_root.len()).find(|&block| is_root[block] && self.roots[block].is_none())
        {
            let most = NODES.min(ALL_NODES.saturating_sub(self.nodes.len()));
            for end in self.grow(block, most.max(1), &loops) {
                is_root[end] = true;
            }
        }
    }

    /// Grows the path that begins with block `root`, to at most `most` nodes. Returns the blocks before which the path
    /// ends.
    fn grow(&mut self, root: usize, most: usize, loops: &[bool]) -> Vec<usize> {
        let (first, mut ends) = (self.add(root, None, Vec::new()), Vec::new());
        self.roots[root] = Some(first);
        let mut open = VecDeque::from([first]);
        while let Some(node) = open.pop_front() {
            let Node { block, calls, .. } = &self.nodes[node];
            for (rip, calls) in self.after(*block, calls) {
                let Some(&block) = self.by_rip.get(&rip) else {
                    continue;
                };
                if block == root {
                    self.turn(node);
                } else if self.nodes.len() - first < most && !loops[block] && self.fits(block, node)
                {
                    let next = self.add(block, Some(node), calls);
                    self.nodes[node].next.push((rip, next));
                    open.push_back(next);
                } else {
                    ends.push(block);
                }
            }
        }
        ends
    }

    /// Whether a block may follow a node: the path does not become too long, and does not contain the block yet.
    fn fits(&self, block: usize, node: usize) -> bool {
        let Node {
            before,
            block: last,
            ..
        } = self.nodes[node];
        let mut above = std::iter::successors(Some(node), |node| self.nodes[*node].parent);
        before + self.blocks[last].len() + self.blocks[block].len() <= INSTRUCTIONS
            && above.all(|node| self.nodes[node].block != block)
    }

    /// Records that a branch leads from a node back to the beginning of the path. Marks this node and all nodes
    /// before it in the path.
    fn turn(&mut self, node: usize) {
        let mut above = Some(node);
        while let Some(node) = above {
            self.nodes[node].turns = true;
            above = self.nodes[node].parent;
        }
    }

    /// Assigns steps to all nodes.
    fn lay_out(&mut self) -> Box<[Step]> {
        let mut steps = Vec::new();
        for node in &mut self.nodes {
            node.step = steps.len();
            let guests = self.blocks[node.block].iter().zip(node.before..);
            steps.extend(guests.map(|(guest, before)| Step {
                before: before as u8,
                ..guest.step
            }));
        }
        steps.into()
    }
}
