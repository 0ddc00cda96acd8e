//! Plain model, operation generator and simulated platform for slat's tests
