// Executes cases under qemu-aarch64 and records the registers after each of them.
//
// argv[1] is the number of an open file, which the test has mapped too; `oracle/qemu.rs` has its layout. For each byte that comes by
// standard input, the helper executes the cases that are in the file, and answers with a byte. A case begins by a return from a signal
// handler, which loads all registers, and ends in a signal handler, which has them all in its context: by BRK, or by a fault.
//
// The program uses no library: a case may use every register.

typedef unsigned int u32;
typedef unsigned long u64;
typedef unsigned char u8;

struct registers {
    u64 x[31], sp, pc, pstate;
    u32 fpcr, fpsr, signal, unused;
    u8 v[512];
};
enum { WINDOW = 512, WORDS = 64, CASES = 1024, SETS = 5, PAGE = 4096 };
struct record {
    struct registers in, out;
    u8 memory[WINDOW], memory_out[WINDOW];
    u32 code[WORDS];
    // Where execution begins, and the set of pages that the memory is in.
    u32 start, set;
};
struct file {
    u64 cases, unused[511];
    u8 pages[SETS][2 * PAGE];
    struct record records[CASES];
};

// No difference of two of these addresses is near a power of two, which programs add to their base often.
#define CODE ((u8 *)0x4123400000)
#define PAGES ((u8 *)0x5000000000)
#define FILE ((struct file *)0x6f31200000)
#define APART 0x357f91000

struct context {
    u64 flags, link, stack[3];
    u8 mask[128];
    u64 fault __attribute__((aligned(16)));
    u64 x[31], sp, pc, pstate;
    u8 reserved[4096] __attribute__((aligned(16)));
};
struct floating {
    u32 magic, size, fpsr, fpcr;
    u8 v[512];
};

static u64 system_call(u64 n, u64 a, u64 b, u64 c, u64 d, u64 e, u64 f) {
    register u64 x8 asm("x8") = n, x0 asm("x0") = a, x1 asm("x1") = b, x2 asm("x2") = c, x3 asm("x3") = d, x4 asm("x4") = e,
        x5 asm("x5") = f;
    asm volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
static void leave(u64 status) { system_call(94, status, 0, 0, 0, 0, 0); }
static void map(u8 *at, u64 bytes, u64 rights, u64 flags, u64 fd, u64 offset) {
    if (system_call(222, (u64)at, bytes, rights, flags | 0x10, fd, offset) != (u64)at) leave(10);
}
static void copy(volatile u8 *to, const u8 *from, u64 bytes) {
    for (u64 i = 0; i < bytes / 8; i++) ((volatile u64 *)to)[i] = ((const u64 *)from)[i];
}

static u64 next;
static struct floating *floating_of(struct context *context) {
    struct floating *floating = (void *)context->reserved;
    while (floating->magic != 0x46508001) {
        if (!floating->magic) leave(11);
        floating = (void *)((u8 *)floating + floating->size);
    }
    return floating;
}
// The window is the last half page-part before the border of two pages, and the first one behind it.
static u8 *window(struct record *record) { return FILE->pages[record->set] + PAGE - WINDOW / 2; }

// Waits for the test, and copies the code of all its cases to their places.
static void begin(void) {
    u8 byte = 0;
    if (system_call(63, 0, (u64)&byte, 1, 0, 0, 0) != 1) leave(0);
    for (u64 i = 0; i < FILE->cases; i++) copy(CODE + i * 4 * WORDS, (u8 *)FILE->records[i].code, 4 * WORDS);
    __builtin___clear_cache((char *)CODE, (char *)CODE + CASES * 4 * WORDS);
    next = 0;
}
void __attribute__((noinline)) handle(int signal, void *info, struct context *context) {
    struct floating *floating = floating_of(context);
    if (signal != 10) {
        struct record *record = &FILE->records[next];
        struct registers *out = &record->out;
        copy((u8 *)out->x, (u8 *)context->x, 31 * 8);
        out->sp = context->sp;
        out->pc = context->pc;
        out->pstate = context->pstate;
        out->fpcr = floating->fpcr;
        out->fpsr = floating->fpsr;
        out->signal = signal;
        copy(out->v, floating->v, 512);
        copy(record->memory_out, window(record), WINDOW);
        next++;
        if (next == FILE->cases) {
            u8 byte = 0;
            system_call(64, 1, (u64)&byte, 1, 0, 0, 0);
            begin();
        }
    } else
        begin();
    struct record *record = &FILE->records[next];
    struct registers *in = &record->in;
    copy(window(record), record->memory, WINDOW);
    copy((u8 *)context->x, (u8 *)in->x, 31 * 8);
    context->sp = in->sp;
    context->pc = (u64)CODE + next * 4 * WORDS + 4 * record->start;
    context->pstate = in->pstate;
    floating->fpcr = in->fpcr;
    floating->fpsr = in->fpsr;
    copy(floating->v, in->v, 512);
}
asm(".globl restore\nrestore: mov x8, #139\nsvc 0");
extern void restore(void);

static u8 stack[65536] __attribute__((aligned(16)));
void __attribute__((noreturn, used)) run(u64 *arguments) {
    u64 fd = 0;
    for (u8 *digit = (u8 *)arguments[2]; *digit; digit++) fd = fd * 10 + *digit - '0';
    map((u8 *)FILE, sizeof(struct file), 3, 1, fd, 0);
    map(CODE, CASES * 4 * WORDS, 7, 0x22, -1, 0);
    static const u8 rights[SETS][2] = {{3, 3}, {3, 0}, {3, 1}, {0, 3}, {1, 3}};
    for (u64 set = 0; set < SETS; set++)
        for (u64 page = 0; page < 2; page++)
            map(PAGES + set * APART + page * PAGE, PAGE, rights[set][page], 1, fd,
                __builtin_offsetof(struct file, pages) + (set * 2 + page) * PAGE);
    u64 alternate[3] = {(u64)stack, 0, sizeof stack};
    if (system_call(132, (u64)alternate, 0, 0, 0, 0, 0)) leave(12);
    // SA_SIGINFO, SA_RESTORER, SA_ONSTACK.
    u64 action[4] = {(u64)handle, 0x0c000004, (u64)restore, ~0ul & ~(1ul << 3 | 1ul << 4 | 1ul << 6 | 1ul << 10)};
    static const u8 signals[] = {4, 5, 7, 8, 10, 11};
    for (u64 i = 0; i < sizeof signals; i++)
        if (system_call(134, signals[i], (u64)action, 0, 8, 0, 0)) leave(13);
    u64 process = system_call(172, 0, 0, 0, 0, 0, 0);
    system_call(129, process, 10, 0, 0, 0, 0);
    leave(14);
    for (;;) {}
}
asm(".globl _start\n_start: mov x0, sp\nb run");
