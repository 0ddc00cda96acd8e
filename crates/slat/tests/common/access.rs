//! An access by a vCPU that enters only for it.

use slat::{Access, Format, Gpa, Stop, Translation, Vcpu};
use slat_model::SimPlatform;

/// Enters the vCPU, quiesces as often as the engine asks for it, translates `gfn`, and leaves.
pub fn touch<F: Format>(
    vcpu: &mut Vcpu<SimPlatform, F>,
    gfn: u64,
    access: Access,
) -> Result<Translation, Stop> {
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    let mut answer = vcpu.translate(Gpa(gfn << 12), access);
    while answer == Err(Stop::Retry) {
        vcpu.quiesce();
        answer = vcpu.translate(Gpa(gfn << 12), access);
    }
    vcpu.leave();
    answer
}
