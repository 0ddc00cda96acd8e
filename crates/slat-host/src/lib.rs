//! slat's platform on Linux userspace
