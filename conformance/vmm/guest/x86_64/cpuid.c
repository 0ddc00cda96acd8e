/* Prints the registers EAX, EBX, ECX, EDX of a CPUID leaf, which is given in hexadecimal. */
#include <cpuid.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    unsigned a, b, c, d;

    if (argc != 2)
        return 2;
    __cpuid_count(strtoul(argv[1], NULL, 16), 0, a, b, c, d);
    printf("%08x %08x %08x %08x\n", a, b, c, d);
    return 0;
}
