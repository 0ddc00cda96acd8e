//! Memory accesses that survive SIGSEGV, SIGBUS and a kick
