/* Tries to change flash memory from the operating system, by the commands of its chip (Intel's command set):
 *
 *     flash ADDRESS
 *
 * ADDRESS is a physical address in hexadecimal, in a block of the flash. Clears a byte there and erases its block. Prints "unchanged" or
 * "changed", as reads of the block show. Where system management mode guards the flash, it obeys no command that comes from outside.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, PROGRAM = 0x40, ERASE = 0x20, CONFIRM = 0xd0, READ_ARRAY = 0xff };

int main(int argc, char **argv)
{
    static uint8_t before[PAGE];
    int changed = 0, memory = open("/dev/mem", O_RDWR | O_SYNC);
    volatile uint8_t *flash;

    if (argc != 2 || memory < 0) {
        perror("usage: flash ADDRESS; /dev/mem");
        return 2;
    }
    flash = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, strtoll(argv[1], NULL, 16));
    if (flash == MAP_FAILED) {
        perror("flash: mmap");
        return 2;
    }
    for (int i = 0; i < PAGE; i++)
        before[i] = flash[i];
    flash[0] = PROGRAM;
    flash[0] = before[0] == 0 ? 0xff : 0;
    flash[0] = READ_ARRAY;
    changed |= flash[0] != before[0];
    flash[0] = ERASE;
    flash[0] = CONFIRM;
    /* Without READ_ARRAY a chip that has obeyed shows its status. */
    changed |= flash[0] != before[0];
    flash[0] = READ_ARRAY;
    for (int i = 0; i < PAGE; i++)
        changed |= flash[i] != before[i];
    puts(changed ? "changed" : "unchanged");
    return 0;
}
