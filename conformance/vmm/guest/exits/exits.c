/* A guest that accesses devices all the time and checks each datum, so that it finds an access that is lost or done twice
 * because its VMM stopped it, saved it and restored it.
 *
 * In each round it reads and writes three disks: one by ports (ATA), one by AHCI and one by virtio. While a disk is busy, and
 * once a round, it accesses registers that answer at once. Some change when they are read: a FIFO, interrupt causes. Others
 * hold what was written.
 *
 * Each round prints "round N" on the first serial port. A wrong datum prints "wrong DEVICE: FOUND, not EXPECTED"; then the
 * guest resets all devices and goes on.
 *
 * Each disk has DISK sectors. Word I of sector N is `word(N, I)` below sector WRITTEN; the guest writes the other sectors.
 */
#include <stddef.h>
#include <stdint.h>

enum { SECTOR = 512, DISK = 128, WRITTEN = 64 };
/* How many cycles a device may take: some 10 seconds. */
#define PATIENCE (1ll << 35)

static uint32_t rounds;

/* Four sectors, the first of which has a 4-byte word in two pages. */
typedef uint32_t __attribute__((aligned(2))) half_aligned;
static _Alignas(4096) uint8_t pages[2][4096];
#define buffer ((half_aligned(*)[SECTOR / 4])(pages[1] - 254))

_Noreturn void restart(void);
_Noreturn void main(void);

/* Defines functions for each instruction that accesses a port, for one operand size. */
#define PORTS(type, suffix)                                                                                          \
    static type in##suffix(uint16_t port)                                                                            \
    {                                                                                                                \
        type value;                                                                                                  \
        __asm__ volatile("in" #suffix " %1, %0" : "=a"(value) : "Nd"(port) : "memory");                              \
        return value;                                                                                                \
    }                                                                                                                \
    static void out##suffix(uint16_t port, type value)                                                               \
    {                                                                                                                \
        __asm__ volatile("out" #suffix " %0, %1" : : "a"(value), "Nd"(port) : "memory");                             \
    }                                                                                                                \
    static void rep_in##suffix(uint16_t port, void *to, size_t count)                                                \
    {                                                                                                                \
        __asm__ volatile("rep ins" #suffix : "+D"(to), "+c"(count) : "d"(port) : "memory");                          \
    }                                                                                                                \
    static void rep_out##suffix(uint16_t port, const void *from, size_t count)                                       \
    {                                                                                                                \
        __asm__ volatile("rep outs" #suffix : "+S"(from), "+c"(count) : "d"(port) : "memory");                       \
    }
PORTS(uint8_t, b)
PORTS(uint16_t, w)
PORTS(uint32_t, l)

/* Copies 4-byte words, of which either side may be MMIO. */
static void copy(volatile void *to, const volatile void *from, size_t words)
{
    __asm__ volatile("rep movsl" : "+D"(to), "+S"(from), "+c"(words) : : "memory");
}

/* Sends `text` by the first serial port. */
static void print(const char *text, size_t length)
{
    while (!(inb(0x3fd) & 0x20))
        ;
    rep_outb(0x3f8, text, length);
}

/* Stores `text` at `line[at]`, and returns the index after it. */
static size_t append(char *line, size_t at, const char *text)
{
    while (*text)
        line[at++] = *text++;
    return at;
}

static size_t append_hex(char *line, size_t at, uint64_t value)
{
    int shift = 60;
    while (shift && !(value >> shift))
        shift -= 4;
    at = append(line, at, "0x");
    for (; shift >= 0; shift -= 4)
        line[at++] = "0123456789abcdef"[value >> shift & 15];
    return at;
}

/* Reports the datum, resets all devices and starts again if it is not as expected. */
static void check(const char *device, uint64_t found, uint64_t expected)
{
    if (found == expected)
        return;
    char line[128];
    size_t at = append(line, 0, "wrong ");
    at = append(line, at, device);
    at = append(line, at, ": ");
    at = append_hex(line, at, found);
    at = append(line, at, ", not ");
    at = append_hex(line, at, expected);
    line[at++] = '\n';
    print(line, at);
    restart();
}

static uint32_t word(uint32_t sector, uint32_t index) { return (sector * (SECTOR / 4) + index) * 0x9e3779b1; }

/* Returns the sector whose words this round writes. No disk has it, so each round writes other words. */
static uint32_t fresh(void) { return DISK + rounds; }

static void fill(half_aligned *to, uint32_t sector)
{
    for (size_t i = 0; i < SECTOR / 4; i++)
        to[i] = word(sector, i);
}

static void check_sector(const char *device, const half_aligned *found, uint32_t sector)
{
    for (size_t i = 0; i < SECTOR / 4; i++)
        check(device, found[i], word(sector, i));
}

/* Sets a BAR of a PCI device on bus 0. */
static void set_bar(unsigned slot, unsigned bar, uint32_t address)
{
    outl(0xcf8, 1u << 31 | slot << 11 | (0x10 + 4 * bar));
    outl(0xcfc, address);
}

/* Enables a PCI device's I/O and memory BARs, and its DMA. */
static void enable(unsigned slot)
{
    outl(0xcf8, 1u << 31 | slot << 11 | 4);
    outw(0xcfc, 7);
}

/* The second serial port: a 16550 that receives what it sends. */

enum { SERIAL = 0x2f8, FIFO = 16 };

static void serial_reset(void)
{
    outb(SERIAL + 1, 0);
    outb(SERIAL + 2, 7);    /* FIFOs, emptied */
    outb(SERIAL + 3, 3);    /* 8 bits */
    outb(SERIAL + 4, 0x10); /* loopback */
}

/* Fills the FIFO, and empties it. */
static void serial(void)
{
    uint8_t sent[FIFO], found[FIFO];
    for (unsigned i = 0; i < FIFO; i++) {
        sent[i] = word(fresh(), i);
        found[i] = ~sent[i];
    }
    outb(SERIAL, sent[0]);
    rep_outb(SERIAL, sent + 1, FIFO - 1);
    found[0] = inb(SERIAL);
    void *end = found + 1;
    for (unsigned i = 1; i < FIFO / 2; i++)
        __asm__ volatile("insb" : "+D"(end) : "d"(SERIAL) : "memory");
    rep_inb(SERIAL, end, FIFO / 2);
    for (unsigned i = 0; i < FIFO; i++)
        check("serial", found[i], sent[i]);
    check("serial status", inb(SERIAL + 5), 0x60); /* nothing is left, nothing was lost */
    outb(SERIAL + 7, rounds);
    check("serial scratch", inb(SERIAL + 7), rounds & 0xff);
}

/* The network card, an 82540EM. Writing to ICS sets bits of ICR, and reading ICR clears it. */

#define CARD 0xe0200000
#define CARD_ICR ((volatile uint32_t *)(CARD + 0xc0))
#define CARD_ICS ((volatile uint32_t *)(CARD + 0xc8))

static void card(void)
{
    /* All causes but a change of the link, which QEMU reports after a migration. */
    enum { CAUSES = 0xfffb };
    uint32_t sent[3], found[3];
    for (unsigned i = 0; i < 3; i++)
        sent[i] = word(fresh(), i) & CAUSES;
    *CARD_ICS = sent[0];
    found[0] = *CARD_ICR;
    *CARD_ICS = sent[1];
    copy(&found[1], CARD_ICR, 1);
    *CARD_ICS = sent[2];
    found[2] = ~0u;
    __asm__ volatile("andl %1, %0" : "+r"(found[2]) : "m"(*CARD_ICR));
    for (unsigned i = 0; i < 3; i++)
        check("card", found[i] & CAUSES, sent[i]);
}

/* The AHCI disk, whose registers are MMIO. */

#define AHCI 0xe0000000
#define AHCI_GHC (*(volatile uint32_t *)(AHCI + 4))

struct port {
    uint32_t clb, clbu, fb, fbu, is, ie, cmd, reserved0, tfd, sig, ssts, sctl, serr, sact, ci;
};
#define AHCI_PORT(n) ((volatile struct port *)(AHCI + 0x100 + 0x80 * (n)))

/* Accesses four registers that hold what was written to them: the list's and the FIS's addresses of a port without a disk. */
static void ahci_registers(void)
{
    volatile uint32_t *device = &AHCI_PORT(5)->clb;
    uint32_t expected[4], found[4], old;
    for (unsigned i = 0; i < 4; i++) {
        expected[i] = word(fresh(), i);
        found[i] = ~expected[i];
    }
    copy(device, expected, 4);
    copy(found, device, 4);
    for (unsigned i = 0; i < 4; i++)
        check("ahci copy", found[i], expected[i]);

    __asm__ volatile("addl %1, %0" : "+m"(device[0]) : "r"(expected[1]));
    expected[0] += expected[1];
    __asm__ volatile("xorl %1, %0" : "+m"(device[1]) : "r"(expected[2]));
    expected[1] ^= expected[2];
    __asm__ volatile("incl %0" : "+m"(device[2]));
    expected[2]++;
    __asm__ volatile("notl %0" : "+m"(device[3]));
    expected[3] = ~expected[3];
    old = rounds;
    __asm__ volatile("lock xaddl %1, %0" : "+m"(device[0]), "+r"(old));
    check("ahci xadd", old, expected[0]);
    expected[0] += rounds;
    old = rounds;
    __asm__ volatile("xchgl %1, %0" : "+m"(device[1]), "+r"(old));
    check("ahci xchg", old, expected[1]);
    expected[1] = rounds;
    old = expected[2];
    __asm__ volatile("lock cmpxchgl %2, %0" : "+m"(device[2]), "+a"(old) : "r"(~rounds));
    check("ahci cmpxchg", old, expected[2]);
    expected[2] = ~rounds;
    old = 1;
    __asm__ volatile("addl %1, %0" : "+r"(old) : "m"(device[3]));
    check("ahci add", old, expected[3] + 1);

    __asm__ volatile("movdqu %1, %%xmm0\n\tmovdqu %%xmm0, %0" : "=m"(found) : "m"(*(volatile uint32_t(*)[4])device));
    for (unsigned i = 0; i < 4; i++)
        check("ahci read-modify-write", found[i], expected[i]);
    for (unsigned i = 0; i < 4; i++)
        expected[i] = word(fresh(), 4 + i);
    __asm__ volatile("movdqu %1, %%xmm0\n\tmovdqu %%xmm0, %0" : "=m"(*(volatile uint32_t(*)[4])device) : "m"(expected));
    __asm__ volatile("pushq %1\n\tpopq %0" : "=m"(found) : "m"(*(volatile uint32_t(*)[4])device));
    __asm__ volatile("movsl" : : "D"(&found[2]), "S"(&device[2]) : "memory");
    found[3] = device[3];
    for (unsigned i = 0; i < 4; i++)
        check("ahci 16 bytes", found[i], expected[i]);
}

/* Accesses the registers that answer at once. */
static void registers(void)
{
    serial();
    card();
    ahci_registers();
}

/* Keeps the compiler from moving accesses to memory that devices access. */
#define BARRIER() __asm__ volatile("" : : : "memory")

/* Waits until `condition` is true, and meanwhile accesses registers. */
#define UNTIL(device, condition)                                                                                     \
    do {                                                                                                             \
        int64_t begin = __builtin_ia32_rdtsc();                                                                      \
        BARRIER();                                                                                                   \
        while (!(condition)) {                                                                                       \
            registers();                                                                                             \
            if ((int64_t)__builtin_ia32_rdtsc() - begin > PATIENCE)                                                  \
                check(device ": " #condition, 0, 1);                                                                 \
        }                                                                                                            \
        BARRIER();                                                                                                   \
    } while (0)

/* The disk that is accessed by ports: ATA. */

enum { PIO_DATA = 0x1e8, PIO_COUNT = 0x1ea, PIO_LBA, PIO_DEVICE = 0x1ee, PIO_COMMAND, PIO_CONTROL = 0x3ee };
/* Words that a repeated instruction moves. */
enum { RUN = 32 };
enum { ATA_BSY = 0x80, ATA_DRDY = 0x40, ATA_DRQ = 8, ATA_ERR = 1 };

static void pio_wait(unsigned expected)
{
    UNTIL("pio", !(inb(PIO_CONTROL) & ATA_BSY));
    check("pio status", inb(PIO_COMMAND) & (ATA_DRDY | ATA_DRQ | ATA_ERR), expected);
}

static void pio_begin(unsigned command, uint32_t lba, unsigned count)
{
    outb(PIO_DEVICE, 0xe0);
    outb(PIO_COUNT, count);
    outb(PIO_LBA, lba);
    outb(PIO_LBA + 1, lba >> 8);
    outb(PIO_LBA + 2, lba >> 16);
    outb(PIO_COMMAND, command);
}

/* Reads four sectors, which must have the words of `sector`, `sector + step` and so on. */
static void pio_read(uint32_t lba, uint32_t sector, uint32_t step)
{
    uint16_t *to = (uint16_t *)buffer;
    for (unsigned i = 0; i < 4; i++)
        fill(buffer[i], ~sector);
    pio_begin(0xc4, lba, 4); /* READ MULTIPLE */
    pio_wait(ATA_DRDY | ATA_DRQ);
    rep_inl(PIO_DATA, to, SECTOR / 4);
    to += SECTOR / 2;
    for (unsigned i = 0; i < SECTOR / 4; i++)
        *to++ = inw(PIO_DATA);
    for (unsigned i = 0; i < SECTOR / 4; i++)
        __asm__ volatile("insw" : "+D"(to) : "d"(PIO_DATA) : "memory");
    for (unsigned i = 0; i < SECTOR / RUN; i++)
        rep_inw(PIO_DATA, to + i * RUN, RUN);
    pio_wait(ATA_DRDY);
    for (unsigned i = 0; i < 4; i++)
        check_sector("pio", buffer[i], sector + i * step);
}

/* Writes the words of `sector` to four sectors. */
static void pio_write(uint32_t lba, uint32_t sector)
{
    const uint16_t *from = (uint16_t *)buffer;
    for (unsigned i = 0; i < 4; i++)
        fill(buffer[i], sector);
    pio_begin(0xc5, lba, 4); /* WRITE MULTIPLE */
    pio_wait(ATA_DRDY | ATA_DRQ);
    rep_outl(PIO_DATA, from, SECTOR / 4);
    from += SECTOR / 2;
    for (unsigned i = 0; i < SECTOR / 4; i++)
        outw(PIO_DATA, *from++);
    for (unsigned i = 0; i < SECTOR / 4; i++)
        __asm__ volatile("outsw" : "+S"(from) : "d"(PIO_DATA) : "memory");
    for (unsigned i = 0; i < SECTOR / RUN; i++)
        rep_outw(PIO_DATA, from + i * RUN, RUN);
    pio_wait(ATA_DRDY);
}

static void pio_reset(void)
{
    outb(PIO_CONTROL, 6); /* SRST, no interrupts */
    outb(PIO_CONTROL, 2);
    UNTIL("pio", !(inb(PIO_CONTROL) & ATA_BSY));
    pio_begin(0xc6, 0, 4); /* SET MULTIPLE: four sectors are one block. */
    pio_wait(ATA_DRDY);
}

static void pio(void)
{
    uint32_t read = rounds % (WRITTEN - 3), written = WRITTEN + rounds % (DISK - WRITTEN - 3);
    pio_read(read, read, 1);
    pio_write(written, fresh());
    pio_read(written, fresh(), 0);
}

static _Alignas(1024) uint32_t ahci_list[256];
static _Alignas(256) uint32_t ahci_received[64];
static _Alignas(128) struct {
    uint8_t fis[128];
    uint32_t address, above, reserved, size;
} ahci_table;

static void ahci_reset(void)
{
    volatile struct port *port = AHCI_PORT(0);
    AHCI_GHC = 1;
    UNTIL("ahci", !(AHCI_GHC & 1));
    AHCI_GHC = 1u << 31;
    port->clb = (uintptr_t)ahci_list;
    port->clbu = 0;
    port->fb = (uintptr_t)ahci_received;
    port->fbu = 0;
    port->cmd = 0x11; /* start, receive */
    UNTIL("ahci", !(port->tfd & (ATA_BSY | ATA_DRQ)));
    port->is = ~0u;
}

static void ahci_request(int write, uint32_t lba)
{
    volatile struct port *port = AHCI_PORT(0);
    const uint8_t fis[] = {0x27, 0x80, write ? 0x35 : 0x25, 0, lba, lba >> 8, lba >> 16, 0x40, 0, 0, 0, 0, 1};
    for (unsigned i = 0; i < sizeof fis; i++)
        ahci_table.fis[i] = fis[i];
    ahci_table.address = (uintptr_t)buffer[0];
    ahci_table.size = SECTOR - 1;
    ahci_list[0] = 1 << 16 | write << 6 | 5;
    ahci_list[2] = (uintptr_t)&ahci_table;
    BARRIER();
    port->ci = 1;
    UNTIL("ahci", !port->ci);
    check("ahci status", port->tfd & (ATA_BSY | ATA_DRQ | ATA_ERR), 0);
    /* Writing what was read acknowledges it. */
    __asm__ volatile("orl $0, %0" : "+m"(port->is));
    check("ahci interrupts", port->is, 0);
}

/* The virtio disk, by its legacy ports, and the modern registers for the ISR and the configuration, at QEMU's offsets. */

enum { VIRTIO = 0xc400, QUEUE = 8 };
enum { VIRTIO_PFN = VIRTIO + 8, VIRTIO_SELECT = VIRTIO + 14, VIRTIO_NOTIFY = VIRTIO + 16, VIRTIO_STATUS = VIRTIO + 18 };
enum { VIRTIO_ISR = VIRTIO + 19, VIRTIO_CAPACITY = VIRTIO + 20 };
#define VIRTIO_MMIO 0xe0100000
#define VIRTIO_MMIO_ISR (*(volatile uint8_t *)(VIRTIO_MMIO + 0x1000))
#define VIRTIO_MMIO_CAPACITY ((volatile uint32_t *)(VIRTIO_MMIO + 0x2000))

static _Alignas(4096) struct {
    struct {
        uint64_t address;
        uint32_t length;
        uint16_t flags, next;
    } descriptors[QUEUE];
    uint16_t flags, index, ring[QUEUE];
    _Alignas(4096) volatile uint16_t used_flags;
    volatile uint16_t used_index;
} queue;

static void virtio_reset(void)
{
    outb(VIRTIO_STATUS, 0);
    queue.index = 0;
    queue.used_index = 0;
    outb(VIRTIO_STATUS, 3); /* acknowledged, driver */
    outw(VIRTIO_SELECT, 0);
    check("virtio queue", inw(VIRTIO + 12), QUEUE);
    outl(VIRTIO_PFN, (uintptr_t)&queue >> 12);
    outb(VIRTIO_STATUS, 7); /* and ready */
    inb(VIRTIO_ISR);
}

static void virtio_request(int write, uint32_t lba)
{
    uint32_t capacity[2];
    check("virtio capacity (port)", inl(VIRTIO_CAPACITY), DISK);
    copy(capacity, VIRTIO_MMIO_CAPACITY, 2);
    check("virtio capacity (MMIO)", capacity[0] | (uint64_t)capacity[1] << 32, DISK);

    struct {
        uint32_t type, priority;
        uint64_t lba;
    } request = {write, 0, lba};
    volatile uint8_t status = 0xff;
    enum { NEXT = 1, WRITE = 2 };
    queue.descriptors[0].address = (uintptr_t)&request;
    queue.descriptors[0].length = sizeof request;
    queue.descriptors[0].flags = NEXT;
    queue.descriptors[0].next = 1;
    queue.descriptors[1].address = (uintptr_t)buffer[0];
    queue.descriptors[1].length = SECTOR;
    queue.descriptors[1].flags = write ? NEXT : NEXT | WRITE;
    queue.descriptors[1].next = 2;
    queue.descriptors[2].address = (uintptr_t)&status;
    queue.descriptors[2].length = 1;
    queue.descriptors[2].flags = WRITE;
    queue.ring[queue.index % QUEUE] = 0;
    BARRIER();
    queue.index++;
    outw(VIRTIO_NOTIFY, 0);
    UNTIL("virtio", queue.used_index == queue.index);
    check("virtio status", status, 0);
    /* Reading it acknowledges it. */
    if (queue.index % 2) {
        check("virtio ISR (port)", inb(VIRTIO_ISR), 1);
        check("virtio ISR (MMIO)", VIRTIO_MMIO_ISR, 0);
    } else {
        check("virtio ISR (MMIO)", VIRTIO_MMIO_ISR, 1);
        check("virtio ISR (port)", inb(VIRTIO_ISR), 0);
    }
}

/* Reads a sector, writes one and reads it. `request` reads a sector to `buffer`, or writes one from there. */
static void disk(const char *device, void (*request)(int write, uint32_t lba))
{
    uint32_t read = rounds % WRITTEN, written = WRITTEN + rounds % (DISK - WRITTEN);
    fill(buffer[0], ~rounds);
    request(0, read);
    check_sector(device, buffer[0], read);
    fill(buffer[0], fresh());
    request(1, written);
    fill(buffer[0], ~rounds);
    request(0, written);
    check_sector(device, buffer[0], fresh());
}

_Noreturn void main(void)
{
    /* The row's command line has these slots. */
    enum { AHCI_SLOT = 5, VIRTIO_SLOT, CARD_SLOT };
    set_bar(AHCI_SLOT, 5, AHCI);
    enable(AHCI_SLOT);
    set_bar(VIRTIO_SLOT, 0, VIRTIO);
    set_bar(VIRTIO_SLOT, 4, VIRTIO_MMIO);
    set_bar(VIRTIO_SLOT, 5, 0);
    enable(VIRTIO_SLOT);
    set_bar(CARD_SLOT, 0, CARD);
    enable(CARD_SLOT);
    *CARD_ICR;
    serial_reset();
    ahci_reset();
    virtio_reset();
    pio_reset();
    for (;;) {
        registers();
        pio();
        disk("ahci", ahci_request);
        disk("virtio", virtio_request);
        rounds++;
        char line[32];
        size_t at = append(line, 0, "round ");
        at = append_hex(line, at, rounds);
        line[at++] = '\n';
        print(line, at);
    }
}
