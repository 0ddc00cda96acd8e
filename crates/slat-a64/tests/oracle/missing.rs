//! The encodings that the processor does not have.

use crate::spec::Encoding;

/// The extensions. Each has a list of classes and beginnings of names. A word with an asterisk before it is a part of
/// a name.
const MISSING: &[(&str, &[&str])] = &[
    ("UDF is UNDEFINED by definition", &["perm_undef"]),
    ("debug state", &["DRPS_"]),
    ("extended hints", &["extendedhints"]),
    (
        "PAuth: its hints are NOPs",
        &[
            "BRAA",
            "BRAB",
            "BLRAA",
            "BLRAB",
            "RETAA",
            "RETAB",
            "ERETAA",
            "ERETAB",
            "miscbranch",
            "PACI",
            "PACD",
            "PACN",
            "PACG",
            "AUT",
            "XPACI_64",
            "XPACD_64",
            "dp_1src_imm",
            "ldst_pac",
        ],
    ),
    (
        "AES, SHA, SM3, SM4",
        &[
            "crypto3_imm2",
            "crypto3_imm6",
            "crypto4",
            "cryptoaes",
            "cryptosha",
        ],
    ),
    ("FCMA", &["FCMLA", "FCADD"]),
    (
        "FHM",
        &["FMLAL_asimd", "FMLAL2_asimd", "FMLSL_asimd", "FMLSL2_asimd"],
    ),
    ("JSCVT", &["FJCVTZS"]),
    ("BF16", &["BFDOT", "BFMLAL", "BFMMLA", "BFCVT"]),
    ("I8MM", &["SMMLA", "USMMLA", "UMMLA", "USDOT", "SUDOT"]),
    (
        "FP8, and what came with it",
        &[
            "FDOT",
            "FMLALB_",
            "FMLALT_",
            "FMLALL",
            "FMMLA",
            "FCVTN_asimdsame2",
            "F1CVTL",
            "F2CVTL",
            "BF1CVTL",
            "BF2CVTL",
            "FSCALE",
            "FAMAX",
            "FAMIN",
            "LUTI",
        ],
    ),
    ("FPRCVT", &["*_sisd_"]),
    (
        "extremes and comparisons of 2026",
        &["FMAXINM", "FMININM", "FMAXMG", "FMINMG", "FCMTL"],
    ),
    (
        "MTE",
        &[
            "addsub_immtags",
            "ldsttags",
            "SUBP_64",
            "SUBPS_64",
            "IRG",
            "GMI",
            "STGP",
        ],
    ),
    (
        "CSSC",
        &[
            "minmax_imm",
            "CTZ_",
            "CNT_32",
            "CNT_64",
            "ABS_32_dp",
            "ABS_64_dp",
            "SMAX_32_dp",
            "SMAX_64_dp",
            "UMAX_32_dp",
            "UMAX_64_dp",
            "SMIN_32_dp",
            "SMIN_64_dp",
            "UMIN_32_dp",
            "UMIN_64_dp",
        ],
    ),
    ("CPA", &["addsub_pt", "MADDPT", "MSUBPT"]),
    ("HBC", &["BC_only"]),
    (
        "CMPBR",
        &["compbranch_imm", "compbranch_regs", "compbranch_regs2"],
    ),
    ("XS", &["DSB_BOn"]),
    ("WFxT", &["systeminstrswithreg"]),
    ("D128", &["syspairinstrs", "systemmovepr"]),
    ("LSE128", &["memop_128"]),
    (
        "LSFE",
        &["LDBF", "STBF", "LDFADD", "LDFM", "STFADD", "STFM"],
    ),
    ("LS64", &["ST64B", "STL64B", "LD64B", "LDA64B"]),
    ("THE", &["rcwcomswap", "rcwcomswappr", "RCW"]),
    (
        "LSUI",
        &[
            "comswap_unpriv",
            "comswappr_unpriv",
            "ldstexclr_unpriv",
            "memop_unpriv",
            "STTP_",
            "LDTP_",
            "STTNP_",
            "LDTNP_",
        ],
    ),
    (
        "LRCPC3",
        &[
            "ldapstl_simd",
            "ldapstl_writeback",
            "ldiappstilp",
            "STL1_",
            "LDAP1_",
        ],
    ),
    ("GCS", &["ldst_gcs"]),
    ("MOPS", &["memcms", "memset_go"]),
    (
        "TME and later ones of its encodings",
        &[
            "systemresult",
            "tchange_imm",
            "tchange_reg",
            "testfault",
            "compfault_imm",
            "compfault_regs",
            "FLT_EX",
            "TENTER",
            "TEXIT",
        ],
    ),
];

/// Returns the extension of an encoding that the processor lacks.
pub fn extension(encoding: &Encoding) -> Option<&'static str> {
    if encoding.class == "hints" {
        return None;
    }
    let is_of = |pattern: &&str| match pattern.strip_prefix('*') {
        Some(part) => encoding.name.contains(part),
        None if pattern.starts_with("crypto") => encoding.class.starts_with(pattern),
        None => encoding.class == *pattern || encoding.name.starts_with(pattern),
    };
    let found = MISSING
        .iter()
        .find(|(_, patterns)| patterns.iter().any(is_of));
    found.map(|(extension, _)| *extension)
}
