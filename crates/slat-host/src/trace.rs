//! Records the engine's events as tracepoints.

use slat::{Access, Event};
use slat_trace::*;

/// Bits of the error code of an x86 page fault (Linux: PFERR_*).
const WRITE: u32 = 1 << 1;
const FETCH: u32 = 1 << 4;

const RET_PF_FIXED: i32 = 3;
const RET_PF_SPURIOUS: i32 = 4;

fn error_code(access: Access) -> u32 {
    match access {
        Access::Read => 0,
        Access::Write => WRITE,
        Access::Execute => FETCH,
    }
}

/// Records an event, if its tracepoint is selected. Inlined, so that if the tracepoint is not selected, the code that
/// makes the event costs only one load.
#[inline(always)]
pub(crate) fn record(event: Event) {
    match event {
        Event::PageFault {
            fault_address,
            access,
        } => point(|| PageFault {
            vcpu_id: vcpu().unwrap_or(u32::MAX),
            fault_address,
            error_code: error_code(access).into(),
        }),
        Event::SpteRequested { gfn, pfn, level } => point(|| SpteRequested {
            gfn: gfn.0,
            pfn: pfn.0,
            level: level.0,
        }),
        Event::FastPageFault {
            gpa,
            access,
            new_spte,
            spurious,
        } => point(|| FastPageFault {
            vcpu_id: vcpu().map_or(-1, |id| id as i32),
            cr2_or_gpa: gpa.0,
            error_code: error_code(access),
            new_spte,
            ret: match spurious {
                true => RET_PF_SPURIOUS,
                false => RET_PF_FIXED,
            },
        }),
        Event::MarkMmioSpte { gfn, generation } => point(|| MarkMmioSpte {
            gfn: gfn.0,
            r#gen: generation as u32,
        }),
        Event::HandleMmioPageFault { addr, gfn } => {
            point(|| HandleMmioPageFault { addr, gfn: gfn.0 })
        }
        Event::SpteZapped {
            gfn,
            old_spte,
            level,
        } => point(|| TdpMmuSpteChanged {
            gfn: gfn.0,
            old_spte,
            new_spte: 0,
            level: level.0,
        }),
        Event::SplitHugePage { gfn, spte, level } => point(|| SplitHugePage {
            gfn: gfn.0,
            spte,
            level: level.0.into(),
            errno: 0,
        }),
        Event::GetPage { gfn, role, created } => point(|| GetPage {
            gfn: gfn.0,
            role: role.0,
            created: created.into(),
        }),
        Event::UnsyncPage { gfn, role } => point(|| UnsyncPage {
            gfn: gfn.0,
            role: role.0,
        }),
        Event::PrepareZapPage { gfn, role } => point(|| PrepareZapPage {
            gfn: gfn.0,
            role: role.0,
        }),
        Event::UnmapHvaRange(range) => point(|| UnmapHvaRange {
            start: range.start.0,
            end: range.end.0,
        }),
        Event::AgeHva(range) => point(|| AgeHva {
            start: range.start.0,
            end: range.end.0,
        }),
        Event::DirtyRingPush {
            dirty_index,
            reset_index,
            slot,
            offset,
        } => point(|| DirtyRingPush {
            dirty_index,
            reset_index,
            slot,
            offset,
        }),
        Event::DirtyRingReset {
            dirty_index,
            reset_index,
        } => point(|| DirtyRingReset {
            dirty_index,
            reset_index,
        }),
        Event::FlushBegin(gfns) => point(|| FlushBegin {
            start: gfns.start.0,
            end: gfns.end.0,
        }),
        Event::FlushEnd(gfns) => point(|| FlushEnd {
            start: gfns.start.0,
            end: gfns.end.0,
        }),
        Event::Quiesce => point(|| Quiesce {}),
        Event::Yield => point(|| Yield {}),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat::{Gfn, Gpa, Hva, Level, PageRole, Pfn};

    #[test]
    fn the_engines_names_are_those_of_tracepoints() {
        let (gfn, pfn, level, role) = (Gfn(1), Pfn(2), Level::PAGE, PageRole(3));
        let access = Access::Read;
        let events = [
            Event::PageFault {
                fault_address: 1,
                access,
            },
            Event::SpteRequested { gfn, pfn, level },
            Event::FastPageFault {
                gpa: Gpa(1),
                access,
                new_spte: 1,
                spurious: false,
            },
            Event::MarkMmioSpte { gfn, generation: 1 },
            Event::HandleMmioPageFault { addr: 1, gfn },
            Event::SpteZapped {
                gfn,
                old_spte: 1,
                level,
            },
            Event::SplitHugePage {
                gfn,
                spte: 1,
                level,
            },
            Event::GetPage {
                gfn,
                role,
                created: true,
            },
            Event::UnsyncPage { gfn, role },
            Event::PrepareZapPage { gfn, role },
            Event::UnmapHvaRange(Hva(1)..Hva(2)),
            Event::AgeHva(Hva(1)..Hva(2)),
            Event::DirtyRingPush {
                dirty_index: 1,
                reset_index: 0,
                slot: 0,
                offset: 0,
            },
            Event::DirtyRingReset {
                dirty_index: 1,
                reset_index: 1,
            },
            Event::FlushBegin(gfn..Gfn(2)),
            Event::FlushEnd(gfn..Gfn(2)),
            Event::Quiesce,
            Event::Yield,
        ];
        for event in events {
            let known = POINTS.iter().any(|point| point.name == event.name());
            assert!(known, "{event}");
        }
    }
}
