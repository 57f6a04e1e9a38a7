/*
 * untar.c - a tar that came over the data pipe, into a directory and nowhere else.
 *
 * Formats: ustar and pax, GNU's long names and base-256 numbers, the old one without a magic. Refused
 * by name, never passed over: devices, sparse files, volumes and what is unknown.
 *
 * Every byte of it is untrusted, and so is every name that is there already:
 *   1. a name is relative and has no ".."; "." and empty components are dropped;
 *   2. the directory that a member goes into is opened from the target directory in one openat2(2)
 *      that neither leaves it nor follows a symlink, whoever put it there, and the member is made in
 *      that directory by its last name, which is never followed either. So a process that swaps
 *      directories for symlinks meanwhile gains nothing;
 *   3. the file that a hard link names is found the same way;
 *   4. files are put in place when they are whole, and replace what is no directory. A directory
 *      that is there stays as it is; a new one gets its mode, owner and time at the end, as it may
 *      have to be closed to the very user who fills it.
 */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAX_MAX     (1u << 20)
#define RETRIES     64           /* EAGAIN: a rename anywhere while RESOLVE_BENEATH looks */
#define DIRECTORIES (256u << 20) /* of address space; only what is used counts */

struct member {
    char type;
    mode_t mode;
    uid_t uid;
    gid_t gid;
    uint64_t size;
    struct timespec mtime;
    bool has_path, has_link, has_size, has_mtime, has_uid, has_gid; /* by an extended header */
    char path[ENTRY_PATH_MAX];
    char link[ENTRY_PATH_MAX];
};

/* What a directory of ours gets at the end. Before it lies its path, NUL-terminated, padded to 8
 * bytes: so they can be gone through from the last, before those that it is in. */
struct directory {
    struct timespec mtime;
    mode_t mode;
    uid_t uid;
    gid_t gid;
    uint32_t size; /* with its path */
};

static struct member member;
static int target_fd;
static uint64_t unpacked_bytes;
static uint8_t *directories;
static size_t directories_used;

static int flaw(enum archive_flaw why) {
    errno = EBADMSG;
    return job_fail_in(STEP_ARCHIVE, why, member.path);
}

/* --- the stream -------------------------------------------------------------------------------- */

static uint8_t inbox[65536];
static size_t inbox_at, inbox_end;

/* What is there, at most `most` bytes: how many, 0 at the end, -1. */
static int take(uint64_t most, const uint8_t **at) {
    if (inbox_at == inbox_end) {
        int got = read_some(job.data_fd, inbox, sizeof inbox);
        if (got < 0)
            return job_fail(STEP_DATA_PIPE, 1);
        inbox_at = 0;
        inbox_end = (size_t)got;
    }
    size_t have = inbox_end - inbox_at;
    *at = inbox + inbox_at;
    have = have > most ? (size_t)most : have;
    inbox_at += have;
    return (int)have;
}

static int take_exactly(void *into, size_t size) {
    const uint8_t *at;
    for (uint8_t *to = into; size;) {
        int got = take(size, &at);
        if (got <= 0)
            return got ? -1 : flaw(ARCHIVE_TRUNCATED);
        memcpy(to, at, (size_t)got);
        to += got;
        size -= (size_t)got;
    }
    return 0;
}

static int pass_over(uint64_t size) {
    const uint8_t *at;
    while (size) {
        int got = take(size, &at);
        if (got <= 0)
            return got ? -1 : flaw(ARCHIVE_TRUNCATED);
        size -= (uint64_t)got;
    }
    return 0;
}

static uint64_t padding(uint64_t size) {
    return (TAR_BLOCK - size % TAR_BLOCK) % TAR_BLOCK;
}

/* --- numbers and names ------------------------------------------------------------------------- */

/* Octal between blanks, or GNU's base-256 where the first bit is set. */
static bool get_number(const char *field, size_t size, int64_t *out) {
    const unsigned char *at = (const unsigned char *)field, *end = at + size;
    uint64_t value = 0;
    if (*at & 0x80) {
        bool negative = *at & 0x40;
        value = (negative ? ~0ull << 6 : 0) | (*at & 0x3f);
        while (++at < end) {
            uint64_t gone = value >> 55; /* all of it must be the sign */
            if (gone != (negative ? 0x1ff : 0))
                return false;
            value = value << 8 | *at;
        }
        *out = (int64_t)value;
        return true;
    }
    while (at < end && *at == ' ')
        at++;
    for (; at < end && *at >= '0' && *at <= '7'; at++)
        value = value << 3 | (uint64_t)(*at - '0');
    if (at < end && *at != ' ' && *at != 0)
        return false;
    *out = (int64_t)value;
    return value <= INT64_MAX;
}

/* Decimal, with a fraction if `ns` is given; the value of a pax record. */
static bool get_decimal(const char *text, int64_t *out, long *ns) {
    bool negative = ns && *text == '-';
    uint64_t value = 0;
    long fraction = 0, unit = 100000000;
    text += negative;
    if (*text < '0' || *text > '9')
        return false;
    for (; *text >= '0' && *text <= '9'; text++) {
        if (value > (INT64_MAX - 9) / 10)
            return false;
        value = value * 10 + (uint64_t)(*text - '0');
    }
    if (ns && *text == '.')
        for (text++; *text >= '0' && *text <= '9'; text++, unit /= 10)
            fraction += unit * (*text - '0');
    *out = negative ? -(int64_t)value : (int64_t)value;
    if (negative && fraction) {
        *out -= 1;
        fraction = 1000000000 - fraction;
    }
    if (ns)
        *ns = fraction;
    return !*text;
}

/* Make a path below the target of what the archive says; empty for the target itself. */
static bool clean(char *path) {
    uint32_t depth = 0;
    char *to = path;
    if (*path == '/')
        return false;
    for (const char *at = path; *at;) {
        size_t len = strcspn(at, "/");
        bool more = at[len] == '/';
        if (len == 2 && at[0] == '.' && at[1] == '.')
            return false;
        if (len && !(len == 1 && *at == '.')) {
            if (len > NAME_MAX || ++depth > job.req.depth)
                return false;
            if (to != path)
                *to++ = '/';
            memmove(to, at, len);
            to += len;
        }
        at += len + more;
    }
    *to = 0;
    return true;
}

/* --- headers ----------------------------------------------------------------------------------- */

static bool set_text(char *to, const char *from, size_t len) {
    if (!len || len >= ENTRY_PATH_MAX || memchr(from, 0, len))
        return false;
    memcpy(to, from, len);
    to[len] = 0;
    return true;
}

/* One record; `value` has a NUL behind its `len` bytes, and what is none of ours may have more. */
static bool pax_record(const char *key, const char *value, size_t len) {
    int64_t number = 0;
    long ns = 0;
    bool whole = strlen(value) == len;
    if (!strcmp(key, "path"))
        return member.has_path = set_text(member.path, value, len);
    if (!strcmp(key, "linkpath"))
        return member.has_link = set_text(member.link, value, len);
    if (!strncmp(key, "GNU.sparse.", 11))
        return false;
    if (!strcmp(key, "mtime")) {
        member.has_mtime = whole && get_decimal(value, &number, &ns);
        member.mtime = (struct timespec){.tv_sec = number, .tv_nsec = ns};
        return member.has_mtime;
    }
    bool is_size = !strcmp(key, "size"), is_uid = !strcmp(key, "uid"), is_gid = !strcmp(key, "gid");
    if (!is_size && !is_uid && !is_gid)
        return true; /* comments, attributes, what others know */
    if (!whole || !get_decimal(value, &number, NULL) || (!is_size && number >= UINT32_MAX))
        return false;
    if (is_size) {
        member.size = (uint64_t)number;
        member.has_size = true;
    } else if (is_uid) {
        member.uid = (uid_t)number;
        member.has_uid = true;
    } else {
        member.gid = (gid_t)number;
        member.has_gid = true;
    }
    return true;
}

static int pax_header(uint64_t size, bool global) {
    static char records[PAX_MAX + 1];
    if (size > PAX_MAX)
        return flaw(ARCHIVE_EXTENSION);
    if (take_exactly(records, (size_t)size) || pass_over(padding(size)))
        return -1;
    for (char *at = records, *end = records + size; at < end && !global;) {
        size_t len = 0;
        char *digit = at;
        for (; digit < end && *digit >= '0' && *digit <= '9' && len <= PAX_MAX; digit++)
            len = len * 10 + (size_t)(*digit - '0');
        if (digit == at || digit == end || *digit != ' ' || len > (size_t)(end - at) ||
            at + len <= digit + 1 || at[len - 1] != '\n')
            return flaw(ARCHIVE_EXTENSION);
        char *key = digit + 1, *last = at + len - 1,
             *equals = memchr(key, '=', (size_t)(last - key));
        if (!equals || memchr(key, 0, (size_t)(equals - key)))
            return flaw(ARCHIVE_EXTENSION);
        *equals = *last = 0;
        if (!pax_record(key, equals + 1, (size_t)(last - equals - 1)))
            return flaw(ARCHIVE_EXTENSION);
        at += len;
    }
    return 0;
}

/* GNU's L and K: the next member's name or link, as a file. */
static int gnu_name(uint64_t size, char *into, bool *has) {
    char text[ENTRY_PATH_MAX + 1];
    if (!size || size > ENTRY_PATH_MAX)
        return flaw(ARCHIVE_NAME);
    if (take_exactly(text, (size_t)size) || pass_over(padding(size)))
        return -1;
    text[size] = 0;
    *has = set_text(into, text, strlen(text));
    return *has ? 0 : flaw(ARCHIVE_NAME);
}

static int read_numbers(const struct tar_header *header) {
    int64_t mode, uid, gid, size, mtime;
    if (!get_number(header->mode, sizeof header->mode, &mode) ||
        !get_number(header->size, sizeof header->size, &size) || size < 0 ||
        !get_number(header->uid, sizeof header->uid, &uid) ||
        !get_number(header->gid, sizeof header->gid, &gid) ||
        !get_number(header->mtime, sizeof header->mtime, &mtime))
        return flaw(ARCHIVE_NUMBER);
    member.mode = (mode_t)(mode & 07777);
    if (!member.has_uid)
        member.uid = uid < 0 || uid >= UINT32_MAX ? (uid_t)-2 : (uid_t)uid;
    if (!member.has_gid)
        member.gid = gid < 0 || gid >= UINT32_MAX ? (gid_t)-2 : (gid_t)gid;
    if (!member.has_mtime)
        member.mtime = (struct timespec){.tv_sec = mtime};
    if (!member.has_size)
        member.size = (uint64_t)size;
    return 0;
}

static void read_names(const struct tar_header *header) {
    if (!member.has_path) {
        size_t prefix_len = 0;
        /* GNU's own format has other fields there. */
        if (!memcmp(header->magic, "ustar", 6)) {
            prefix_len = strnlen(header->prefix, sizeof header->prefix);
            memcpy(member.path, header->prefix, prefix_len);
            if (prefix_len)
                member.path[prefix_len++] = '/';
        }
        size_t len = strnlen(header->name, sizeof header->name);
        memcpy(member.path + prefix_len, header->name, len);
        member.path[prefix_len + len] = 0;
    }
    if (!member.has_link) {
        size_t len = strnlen(header->link, sizeof header->link);
        memcpy(member.link, header->link, len);
        member.link[len] = 0;
    }
}

/* 1: a member; 0: the end; -1. */
static int next_member(void) {
    static const struct tar_header zeros;
    struct tar_header header;
    int64_t stated, size;
    member = (struct member){0};
    for (int extensions = 0; extensions < 16; extensions++) {
        const uint8_t *at;
        int got = take(sizeof header, &at);
        if (got <= 0)
            return got ? -1 : flaw(ARCHIVE_TRUNCATED);
        memcpy(&header, at, (size_t)got);
        if (take_exactly((uint8_t *)&header + got, sizeof header - (size_t)got))
            return -1;
        if (!memcmp(&header, &zeros, sizeof zeros))
            return extensions ? flaw(ARCHIVE_TRUNCATED) : 0;
        if (!get_number(header.checksum, sizeof header.checksum, &stated) ||
            ((uint32_t)stated != tar_checksum(&header, false) &&
             (uint32_t)stated != tar_checksum(&header, true)))
            return flaw(ARCHIVE_HEADER);
        if (!get_number(header.size, sizeof header.size, &size) || size < 0)
            return flaw(ARCHIVE_NUMBER);
        int r;
        if (header.type == 'x' || header.type == 'g') {
            r = pax_header((uint64_t)size, header.type == 'g');
        } else if (header.type == 'L') {
            r = gnu_name((uint64_t)size, member.path, &member.has_path);
        } else if (header.type == 'K') {
            r = gnu_name((uint64_t)size, member.link, &member.has_link);
        } else {
            member.type = header.type;
            read_names(&header);
            return read_numbers(&header) ? -1 : 1;
        }
        if (r)
            return -1;
    }
    return flaw(ARCHIVE_EXTENSION);
}

/* --- below the target -------------------------------------------------------------------------- */

static int open_below(int dir_fd, const char *path) {
    /* Without O_NOFOLLOW: a symlink at the end is ELOOP then too, and not ENOTDIR. */
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
                           .resolve =
                               RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS};
    long fd;
    int tries = 0;
    do
        fd = syscall(SYS_openat2, dir_fd, *path ? path : ".", &how, sizeof how);
    while (fd < 0 && errno == EAGAIN && ++tries < RETRIES);
    return (int)fd;
}

/* The directory at `path`, made where it is missing. */
static int make_below(char *path) {
    int fd = open_below(target_fd, path), dir = -1;
    if (fd >= 0 || errno != ENOENT)
        return fd;
    for (char *at = path;; at++) {
        at = strchrnul(at, '/');
        char saved = *at, *name = memrchr(path, '/', (size_t)(at - path));
        *at = 0;
        name = name ? name + 1 : path;
        int above = dir < 0 ? target_fd : dir;
        fd = open_below(above, name);
        if (fd < 0 && errno == ENOENT && (!mkdirat(above, name, 0755) || errno == EEXIST))
            fd = open_below(above, name);
        int err = errno;
        if (dir >= 0)
            close(dir);
        *at = saved;
        errno = err;
        if (fd < 0 || !saved)
            return fd;
        dir = fd;
    }
}

/* Open the directory that a member is in; *base is its last name. */
static int open_parent(char *path, const char **base, bool make) {
    char *slash = strrchr(path, '/');
    *base = slash ? slash + 1 : path;
    if (!slash)
        return open_below(target_fd, "");
    *slash = 0;
    int fd = make ? make_below(path) : open_below(target_fd, path);
    int err = errno;
    *slash = '/';
    errno = err;
    return fd;
}

static int failed(uint32_t index) {
    if (errno == ELOOP)
        return flaw(ARCHIVE_LINK);
    if (errno == ENOTDIR || errno == EISDIR)
        return flaw(ARCHIVE_IN_THE_WAY);
    return job_fail_in(STEP_FILE_TREE, index, member.path);
}

static bool owners(uid_t *uid, gid_t *gid) {
    bool archives = job.req.flags & FILE_OWNERS;
    *uid = archives ? member.uid : job.owner;
    *gid = archives ? member.gid : job.group;
    return archives || *job.other;
}

/* --- members ----------------------------------------------------------------------------------- */

static int put_file(int parent, const char *base) {
    struct fresh fresh;
    uid_t uid;
    gid_t gid;
    if (fresh_open(parent, &fresh))
        return failed(20);
    int r = 0;
    for (uint64_t left = member.size; left && !r;) {
        const uint8_t *at;
        int got = take(left, &at);
        if (got <= 0)
            r = got ? -1 : flaw(ARCHIVE_TRUNCATED);
        else if (write_all(fresh.fd, at, (size_t)got))
            r = job_fail_in(STEP_FILE_WRITE, 4, member.path);
        else
            left -= (uint64_t)got;
    }
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, member.mtime};
    if (!r &&
        ((owners(&uid, &gid) && fchown(fresh.fd, uid, gid)) || fchmod(fresh.fd, member.mode) ||
         futimens(fresh.fd, times) || fresh_place(parent, &fresh, base)))
        r = failed(21);
    fresh_drop(parent, &fresh);
    return r;
}

static int try_link(int parent, const char *base, int source, const char *source_base) {
    if (member.type == '1')
        return linkat(source, source_base, parent, base, 0);
    if (member.type == '2')
        return symlinkat(member.link, parent, base);
    return mkfifoat(parent, base, member.mode);
}

/* A link or a FIFO, in the place of what is no directory. */
static int put_special(int parent, const char *base, int source, const char *source_base) {
    struct stat there, st;
    uid_t uid;
    gid_t gid;
    if (try_link(parent, base, source, source_base)) {
        if (errno != EEXIST)
            return failed(22);
        if (member.type == '1' && !fstatat(parent, base, &there, AT_SYMLINK_NOFOLLOW) &&
            !fstatat(source, source_base, &st, AT_SYMLINK_NOFOLLOW) && there.st_ino == st.st_ino &&
            there.st_dev == st.st_dev)
            return 0;
        if (unlinkat(parent, base, 0) || try_link(parent, base, source, source_base))
            return failed(23);
    }
    if (member.type == '1')
        return 0; /* mode, owner and time are the file's, which was there before */
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, member.mtime};
    if ((owners(&uid, &gid) && fchownat(parent, base, uid, gid, AT_SYMLINK_NOFOLLOW)) ||
        utimensat(parent, base, times, AT_SYMLINK_NOFOLLOW))
        return failed(24);
    return 0;
}

static int put_hard_link(int parent, const char *base) {
    const char *source_base;
    if (!clean(member.link) || !*member.link)
        return flaw(ARCHIVE_LINK);
    int source = open_parent(member.link, &source_base, false);
    if (source < 0)
        return errno == ENOENT || errno == ENOTDIR ? flaw(ARCHIVE_LINK) : failed(25);
    struct stat st;
    int r = fstatat(source, source_base, &st, AT_SYMLINK_NOFOLLOW) && errno == ENOENT
                ? flaw(ARCHIVE_LINK)
                : put_special(parent, base, source, source_base);
    close(source);
    return r;
}

/* Remember what a directory gets once it is filled. */
static int put_directory(int parent, const char *base) {
    if (mkdirat(parent, base, 0700)) {
        int fd = errno == EEXIST ? open_below(parent, base) : -1;
        if (fd < 0)
            return failed(26);
        close(fd);
        return 0;
    }
    size_t len = strlen(member.path) + 1, size = (sizeof(struct directory) + len + 7) & ~7ul;
    if (!directories) {
        void *pages = mmap(NULL, DIRECTORIES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pages == MAP_FAILED)
            return failed(27);
        directories = pages;
    }
    if (size > DIRECTORIES - directories_used)
        return flaw(ARCHIVE_ENTRIES);
    struct directory record = {member.mtime, member.mode, member.uid, member.gid, (uint32_t)size};
    memcpy(directories + directories_used, member.path, len);
    memcpy(directories + directories_used + size - sizeof record, &record, sizeof record);
    directories_used += size;
    return 0;
}

/* From the last, as the mode of one may close the way to those in it. One that is no longer there, or
 * no longer a directory, is none of the archive's. */
static int finish_directories(void) {
    uid_t uid;
    gid_t gid;
    while (directories_used) {
        struct directory record;
        char self[32];
        memcpy(&record, directories + directories_used - sizeof record, sizeof record);
        directories_used -= record.size;
        strcpy(member.path, (const char *)directories + directories_used);
        member.uid = record.uid;
        member.gid = record.gid;
        int fd = open_below(target_fd, member.path);
        if (fd < 0)
            continue;
        struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, record.mtime};
        text_number(stpcpy(self, "self/fd/"), (unsigned long)fd);
        if (utimensat(job.child->proc_fd, self, times, 0) ||
            (owners(&uid, &gid) && fchownat(fd, "", uid, gid, AT_EMPTY_PATH)) ||
            fd_chmod(fd, record.mode))
            return failed(28);
        close(fd);
    }
    return 0;
}

static int put_member(void) {
    const char *base;
    bool regular = member.type == '0' || member.type == 0 || member.type == '7';
    if (regular && *member.path && member.path[strlen(member.path) - 1] == '/')
        member.type = '5'; /* as before POSIX */
    regular = regular && member.type != '5';
    if (!regular && (!member.type || !strchr("1256", member.type)))
        return flaw(ARCHIVE_TYPE);
    /* A link's or directory's size is no content, but for old hard links that bring the file again. */
    uint64_t content = regular ? member.size : member.type == '1' ? member.size : 0;
    if (!*member.path || !clean(member.path) || (!*member.path && member.type != '5'))
        return flaw(ARCHIVE_NAME);
    if (!*member.path)
        return 0; /* the target itself stays as it is */
    if (job.record->size == job.req.entries)
        return flaw(ARCHIVE_ENTRIES);
    if (content > job.req.length - unpacked_bytes)
        return flaw(ARCHIVE_SIZE);
    unpacked_bytes += content;
    if (!filter_wants(member.path))
        return pass_over(content) || pass_over(padding(content));
    int parent = open_parent(member.path, &base, true);
    if (parent < 0)
        return failed(29);
    int r = regular              ? put_file(parent, base)
            : member.type == '5' ? put_directory(parent, base)
            : member.type == '1' ? put_hard_link(parent, base) || pass_over(content)
                                 : put_special(parent, base, -1, NULL);
    close(parent);
    job.record->size++;
    return r || pass_over(padding(content)) ? -1 : 0;
}

int tar_unpack(void) {
    char buffer[PATH_MAX];
    const uint8_t *at;
    int r;
    errno = ENAMETOOLONG;
    if (strlen(job.path) >= sizeof buffer)
        return job_fail(STEP_FILE_OPEN, 0);
    strcpy(buffer, job.path);
    target_fd =
        path_open_directory(job.child->root_fd, buffer, (job.req.flags & FILE_PARENTS) != 0);
    if (target_fd < 0)
        return job_fail(errno == ENOTDIR ? STEP_FILE_TYPE : STEP_FILE_OPEN, 2);
    umask(0);
    while ((r = next_member()) == 1)
        if (put_member())
            return -1;
    if (r)
        return -1;
    while ((r = take(sizeof inbox, &at)) > 0)
        ; /* what pads the archive to its record size */
    return r ? -1 : finish_directories();
}
