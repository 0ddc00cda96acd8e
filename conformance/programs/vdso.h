// The kernel's shared object in each process (vDSO), and calls of its functions that they cannot answer themselves: each
// makes a system call by an instruction in the vDSO, whatever C library there is.
#include <elf.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/types.h>
#include <time.h>

// Returns the address of one of its functions; NULL: this kernel's has none of that name.
static void *vdso_function(const char *name)
{
	const Elf64_Ehdr *file = (void *)getauxval(AT_SYSINFO_EHDR);
	const Elf64_Phdr *segment;
	const Elf64_Dyn *entry = NULL;
	const Elf64_Sym *symbol = NULL;
	const char *names = NULL;
	uintptr_t base = (uintptr_t)file;

	if (file == NULL)
		return NULL;
	segment = (void *)(base + file->e_phoff);
	for (int i = 0; i < file->e_phnum; i++)
		if (segment[i].p_type == PT_DYNAMIC)
			entry = (void *)(base + segment[i].p_offset);
	// It is linked for the address 0.
	for (; entry->d_tag != DT_NULL; entry++) {
		if (entry->d_tag == DT_SYMTAB)
			symbol = (void *)(base + entry->d_un.d_ptr);
		if (entry->d_tag == DT_STRTAB)
			names = (void *)(base + entry->d_un.d_ptr);
	}
	// The names follow the symbols.
	for (; (const char *)(symbol + 1) <= names; symbol++)
		if (symbol->st_shndx != SHN_UNDEF && !strcmp(names + symbol->st_name, name))
			return (void *)(base + symbol->st_value);
	return NULL;
}

// Makes all the calls that the functions of this kernel's vDSO leave to the kernel. Returns the name of one with a wrong
// answer, or NULL.
static inline const char *vdso_falls_back(void)
{
	typedef int clock_function(clockid_t, struct timespec *);
	typedef ssize_t random_function(void *, size_t, unsigned, void *, size_t);
	clock_function *get = vdso_function("__vdso_clock_gettime"), *resolution = vdso_function("__vdso_clock_getres");
	random_function *random = vdso_function("__vdso_getrandom");
	static const clockid_t clocks[] = { CLOCK_PROCESS_CPUTIME_ID, CLOCK_THREAD_CPUTIME_ID };
	struct timespec now = { 0, 0 };
	uint64_t bytes[2] = { 0, 0 };

	for (int i = 0; i < 2; i++) {
		if (get != NULL && (get(clocks[i], &now) != 0 || (now.tv_sec == 0 && now.tv_nsec == 0)))
			return "__vdso_clock_gettime";
		now = (struct timespec){ 1, 0 };
		if (resolution != NULL && (resolution(clocks[i], &now) != 0 || now.tv_sec != 0))
			return "__vdso_clock_getres";
	}
	if (get != NULL && get(77, &now) != -EINVAL)
		return "__vdso_clock_gettime of no clock";
	// Without memory for the generator's state.
	if (random != NULL && (random(bytes, sizeof(bytes), 0, NULL, 0) != sizeof(bytes) || (bytes[0] | bytes[1]) == 0))
		return "__vdso_getrandom";
	return NULL;
}
