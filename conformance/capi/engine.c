/*
 * The engine by its C functions: a platform of one array of frames, of which some hold tables and some back guest memory. In each
 * format faults map pages, writes are logged, the host moves a page, and in the end every frame is free. A buffer that a page walker fills
 * is drained to a log.
 */
#include <errno.h>
#include <sched.h>
#include <slat-engine.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                   \
    do {                                                                   \
        if (!(condition)) {                                                \
            fprintf(stderr, "%d: %s\n", __LINE__, #condition);             \
            exit(1);                                                       \
        }                                                                  \
    } while (0)

enum { PAGE = 4096, FRAMES = 256, PAGES = 16, RAM = 0x100000, LOG_DIRTY = 1 };

struct host {
    char *memory;
    /* Frame 0 is used: its number means that there is none. */
    bool used[FRAMES];
    /* The frame behind each page of backing. */
    uint64_t backing[PAGES];
    int flushes;
    /* What the walker of the VM's CPU has left in its buffer. */
    struct slat_vm *vm;
    uint64_t buffer[PAGES];
    size_t written;
};

static uint64_t allocate(void *context, size_t count)
{
    struct host *host = context;
    for (size_t first = count; first + count <= FRAMES; first += count) {
        size_t free = 0;
        while (free < count && !host->used[first + free])
            free++;
        if (free == count) {
            memset(host->used + first, true, count);
            return first;
        }
    }
    return 0;
}

static void release(void *context, uint64_t frame)
{
    struct host *host = context;
    CHECK(host->used[frame]);
    host->used[frame] = false;
}

static void *address(void *context, uint64_t frame)
{
    struct host *host = context;
    return host->memory + frame * PAGE;
}

static int resolve(void *context, uint64_t backing, uint32_t access, struct slat_page *page)
{
    struct host *host = context;
    (void)access;
    if (backing / PAGE >= PAGES)
        return -EFAULT;
    page->frame = host->backing[backing / PAGE];
    page->size = PAGE;
    page->writable = page->executable = true;
    return 0;
}

static void flush(void *context, uint64_t first, uint64_t pages)
{
    struct host *host = context;
    (void)first;
    CHECK(pages > 0);
    host->flushes++;
}

static void pause_a_little(void *context, uint32_t round)
{
    (void)context;
    (void)round;
    sched_yield();
}

static void drain(void *context)
{
    struct host *host = context;
    CHECK(slat_vm_drain(host->vm, host->buffer, host->written) == 0);
    host->written = 0;
}

/* The walker of the CPU writes to a page that is mapped, and the harvest finds it by the buffer. */
static void log_by_buffer(struct host *host, struct slat_vm *vm, struct slat_vcpu *vcpu)
{
    uint64_t log;
    host->vm = vm;
    CHECK(slat_vm_set_policy(vm, "dirty_log", "paper") == -EINVAL);
    CHECK(strstr(slat_last_error(), "buffer"));
    CHECK(slat_vm_set_policy(vm, "dirty_log", "buffer") == 0);
    CHECK(slat_vm_set_region(vm, 2, RAM, PAGES * PAGE, 0, LOG_DIRTY) == 0);
    CHECK(slat_vcpu_fault(vcpu, RAM + 3 * PAGE, SLAT_WRITE) == 0);
    CHECK(slat_vm_dirty_log(vm, 2, &log, 1) == 0 && log == 1 << 3);
    host->buffer[host->written++] = RAM + 3 * PAGE;
    host->buffer[host->written++] = RAM + PAGES * PAGE;
    CHECK(slat_vm_dirty_log(vm, 2, &log, 1) == 0 && log == 1 << 3 && host->written == 0);
    CHECK(slat_vm_dirty_log(vm, 2, &log, 1) == 0 && log == 0);
    CHECK(slat_vm_remove_region(vm, 2) == 0);
}

/* Moves the first page to another frame. */
static int move(void *context)
{
    struct host *host = context;
    uint64_t new = allocate(host, 1);
    CHECK(new != 0);
    release(host, host->backing[0]);
    host->backing[0] = new;
    return 7;
}

static void try(uint32_t format)
{
    struct host host = { .memory = aligned_alloc(PAGE, FRAMES * PAGE) };
    struct slat_platform platform = {
        .context = &host, .allocate = allocate, .free = release, .address = address,
        .resolve = resolve, .flush = flush, .wait = pause_a_little, .drain = drain,
    };
    struct slat_vm *vm;
    struct slat_vcpu *vcpu;
    uint64_t frame, log = 0;

    for (int i = 0; i < PAGES; i++)
        host.backing[i] = allocate(&host, 1);
    CHECK(slat_vm_create(format, &platform, &vm) == 0);
    CHECK(slat_vcpu_create(vm, &vcpu) == 0);
    CHECK(slat_vm_root(vm, &frame) == 0 && host.used[frame]);
    CHECK(slat_vm_set_region(vm, 0, RAM, PAGES * PAGE, 0, LOG_DIRTY) == 0);
    CHECK(slat_vm_set_region(vm, 1, RAM, PAGE, 0, 0) == -EEXIST);
    CHECK(strstr(slat_last_error(), "memslot 0"));
    CHECK(slat_vm_set_region(vm, 1, 1, PAGE, 0, 0) == -EINVAL);

    CHECK(slat_vm_lookup(vm, RAM, &frame) == -ENOENT);
    CHECK(slat_vcpu_fault(vcpu, RAM, SLAT_READ) == 0);
    CHECK(slat_vm_lookup(vm, RAM, &frame) == 0 && frame == host.backing[0]);
    CHECK(slat_vcpu_fault(vcpu, 0xfee00000, SLAT_WRITE) == SLAT_MMIO);
    CHECK(slat_vcpu_fault(vcpu, RAM, 3) == -EINVAL);

    CHECK(slat_vcpu_fault(vcpu, RAM + 5 * PAGE, SLAT_WRITE) == 0);
    /* The tables of x86 let the guest write what it has read, and the page counts as written, as in KVM. */
    uint64_t read = format == SLAT_EPT || format == SLAT_NPT || format == SLAT_EPT5 || format == SLAT_NPT5;
    CHECK(slat_vm_dirty_log(vm, 0, &log, 1) == 0 && log == (1 << 5 | read));
    CHECK(slat_vm_dirty_log(vm, 0, &log, 1) == 0 && log == 0);
    CHECK(slat_vm_dirty_log(vm, 0, NULL, 0) == -EFAULT);

    int flushes = host.flushes;
    CHECK(slat_vm_invalidate(vm, 0, PAGE, move, &host) == 7);
    CHECK(host.flushes > flushes);
    CHECK(slat_vm_lookup(vm, RAM, &frame) == -ENOENT);
    CHECK(slat_vcpu_fault(vcpu, RAM, SLAT_READ) == 0);
    CHECK(slat_vm_lookup(vm, RAM, &frame) == 0 && frame == host.backing[0]);

    CHECK(slat_vm_remove_region(vm, 0) == 0);
    CHECK(slat_vcpu_fault(vcpu, RAM, SLAT_READ) == SLAT_MMIO);
    /* The hardware of AArch64 sets no dirty bits in these tables. */
    if (format != SLAT_STAGE2 && format != SLAT_STAGE2_LPA2)
        log_by_buffer(&host, vm, vcpu);
    slat_vm_destroy(vm);
    slat_vcpu_destroy(vcpu);
    for (int i = 0; i < PAGES; i++)
        release(&host, host.backing[i]);
    for (int i = 0; i < FRAMES; i++)
        CHECK(!host.used[i]);

    platform.flush = NULL;
    CHECK(slat_vm_create(format, &platform, &vm) == -EINVAL);
    free(host.memory);
}

int main(void)
{
    for (uint32_t format = SLAT_EPT; format <= SLAT_SV57X4; format++)
        try(format);
    struct slat_platform none = { 0 };
    struct slat_vm *vm;
    CHECK(slat_vm_create(SLAT_STAGE2_64K + 1, &none, &vm) == -EINVAL);
    puts("eight formats");
    return 0;
}
