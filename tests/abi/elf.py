# SPDX-License-Identifier: Apache-2.0
"""As much of a 64-bit little-endian ELF file as the ABI checks need."""
import struct

DT_NEEDED, DT_SONAME = 1, 14
PT_LOAD = 1
STB_LOCAL, STB_GNU_UNIQUE = 0, 10
SHT_SYMTAB, SHT_DYNAMIC, SHT_DYNSYM, SHT_VERDEF, SHT_VERNEED, SHT_VERSYM = 2, 6, 11, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF


class Elf:
    def __init__(self, path):
        self.data = open(path, "rb").read()
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise SystemExit("%s is not a 64-bit little-endian ELF file" % path)
        header = struct.unpack_from("<HHIQQQIHHHHHH", self.data, 16)
        ph_at, sh_at, ph_size, ph_count, sh_size, sh_count = (header[i] for i in (4, 5, 8, 9, 10, 11))
        self.segments = [struct.unpack_from("<IIQQQQQQ", self.data, ph_at + i * ph_size) for i in range(ph_count)]
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", self.data, sh_at + i * sh_size) for i in range(sh_count)]

    def section(self, kind):
        """(bytes, section header) of the first section of a kind."""
        for s in self.sections:
            if s[1] == kind:
                return self.data[s[4]:s[4] + s[5]], s
        return b"", None

    def strings(self, section):
        s = self.sections[section[6]]
        return self.data[s[4]:s[4] + s[5]]

    @staticmethod
    def text(table, at):
        return table[at:table.index(b"\0", at)].decode()

    def dynamic(self, tag):
        data, section = self.section(SHT_DYNAMIC)
        table = self.strings(section)
        pairs = struct.iter_unpack("<QQ", data)
        return [self.text(table, value) for kind, value in pairs if kind == tag]

    def symbols(self, kind=SHT_DYNSYM):
        """(name, binding, defined, version index or None)."""
        data, section = self.section(kind)
        if section is None:
            return
        table = self.strings(section)
        versions = [v for v, in struct.iter_unpack("<H", self.section(SHT_VERSYM)[0])]
        for i, (name, info, _, index, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", data)):
            version = versions[i] & 0x7FFF if kind == SHT_DYNSYM and versions else None
            yield self.text(table, name), info >> 4, index != 0, version

    def needed_versions(self):
        """[(library, version)], e.g. ("libc.so.6", "GLIBC_2.34")."""
        data, section = self.section(SHT_VERNEED)
        if section is None:
            return []
        table, found, at = self.strings(section), [], 0
        while True:
            _, count, file, aux, following = struct.unpack_from("<HHIII", data, at)
            entry = at + aux
            for _ in range(count):
                _, _, _, name, next_aux = struct.unpack_from("<IHHII", data, entry)
                found.append((self.text(table, file), self.text(table, name)))
                entry += next_aux
            if following == 0:
                return found
            at += following

    def defined_versions(self):
        """{index: name} of the versions this file defines."""
        data, section = self.section(SHT_VERDEF)
        if section is None:
            return {}
        table, found, at = self.strings(section), {}, 0
        while True:
            _, _, index, _, _, aux, following = struct.unpack_from("<HHHHIII", data, at)
            found[index] = self.text(table, struct.unpack_from("<I", data, at + aux)[0])
            if following == 0:
                return found
            at += following

    def loaded_bytes(self):
        """Bytes of the file that are mapped: its size once stripped, but for the section headers."""
        return sum(s[5] for s in self.segments if s[0] == PT_LOAD)
