/*
 * glob.c - names against patterns, and which entries of a tree an operation is for.
 *
 * Not fnmatch(3): that knows no `**`, and goes back over every star there was. Here only the last
 * star and the last `**` are ever tried again, which is enough (what an earlier one could take, the
 * last can), so no pattern makes it slower than a power of the length.
 */
#include "files.h"

#include <string.h>

/* Does the set after '[' hold c? *end is behind its ']', or NULL where there is none. */
static bool in_set(const char *set, unsigned char c, const char **end) {
    bool negated = *set == '!' || *set == '^', found = false;
    const char *at = set + negated;
    for (const char *first = at; *at && (*at != ']' || at == first); at++) {
        unsigned char low = (unsigned char)*at, high = low;
        if (at[1] == '-' && at[2] && at[2] != ']') {
            high = (unsigned char)at[2];
            at += 2;
        }
        found |= low <= c && c <= high;
    }
    *end = *at ? at + 1 : NULL;
    return found != negated;
}

/* Behind what matches the one character c, or NULL. */
static const char *match_one(const char *pattern, char c) {
    const char *end;
    if (*pattern == '?')
        return c != '/' ? pattern + 1 : NULL;
    if (*pattern == '[') {
        bool found = in_set(pattern + 1, (unsigned char)c, &end);
        if (end)
            return found && c != '/' ? end : NULL;
    }
    if (*pattern == '\\' && pattern[1])
        pattern++;
    return *pattern == c ? pattern + 1 : NULL;
}

bool glob_match(const char *pattern, const char *text) {
    const char *star = NULL, *star_text = NULL, *deep = NULL, *deep_text = NULL;
    bool whole_names = false; /* the last ** stands for names with their slashes */
    for (;;) {
        const char *next;
        if (pattern[0] == '*' && pattern[1] == '*') {
            while (*pattern == '*')
                pattern++;
            whole_names = *pattern == '/';
            deep = pattern += whole_names;
            deep_text = text;
            star = NULL;
        } else if (*pattern == '*') {
            star = ++pattern;
            star_text = text;
        } else if (!*text && !*pattern) {
            return true;
        } else if (*text && *pattern && (next = match_one(pattern, *text))) {
            pattern = next;
            text++;
        } else if (star && *star_text && *star_text != '/') {
            pattern = star;
            text = ++star_text;
        } else if (deep && *deep_text) {
            if (whole_names) {
                const char *slash = strchr(deep_text, '/');
                if (!slash)
                    return false;
                deep_text = slash;
            }
            pattern = deep;
            text = ++deep_text;
            star = NULL;
        } else {
            return false;
        }
    }
}

static bool any_matches(uint32_t first, uint32_t count, const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    for (uint32_t i = first; i < first + count; i++) {
        const char *pattern = job.patterns[i];
        bool of_path = strchr(pattern, '/') != NULL;
        if (glob_match(*pattern == '/' ? pattern + 1 : pattern, of_path ? path : name))
            return true;
    }
    return false;
}

bool filter_includes(const char *path) {
    return !job.req.include_count || any_matches(0, job.req.include_count, path);
}

bool filter_excludes(const char *path) {
    return any_matches(job.req.include_count, job.req.exclude_count, path);
}

bool filter_wants(const char *path) {
    char above[ENTRY_PATH_MAX];
    bool included = false;
    for (const char *end = path; *end; end++) {
        end = strchrnul(end + 1, '/');
        memcpy(above, path, (size_t)(end - path));
        above[end - path] = 0;
        if (filter_excludes(above))
            return false;
        included = included || filter_includes(above);
        if (!*end)
            break;
    }
    return included;
}
