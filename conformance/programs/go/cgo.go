//go:build cgo

package main

// static int nothing(void) { return 0; }
import "C"

func init() { C.nothing() }
