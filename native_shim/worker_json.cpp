// SPDX-License-Identifier: MIT
#include "worker_json.h"

#include <cstring>

namespace worker {

// A value's share of what reading and ending a text takes, more or less.
constexpr size_t BYTES_PER_VALUE = 128;

// Looks at what opens, closes and parts outside of strings, and so need not know what else is wrong with the text.
// Returns how many values there are, about.
static size_t check_depth(const std::string &text) {
    size_t depth = 0, values = 1;
    bool in_string = false;
    for (size_t i = 0; i < text.size(); i++) {
        const char c = text[i];
        if (in_string) {
            i += c == '\\';
            in_string = c != '"';
        } else if (c == '"') {
            in_string = true;
        } else if (c == ',') {
            values++;
        } else if (c == '{' || c == '[') {
            values++;
            if (++depth > MAX_DEPTH) {
                fail(CODE_JSON, "the text is nested more than %zu deep at byte %zu", MAX_DEPTH, i);
            }
        } else if ((c == '}' || c == ']') && depth > 0) {
            depth--;
        }
    }
    return values;
}

// Ending a list takes memory too, and where a destructor finds none the process ends. So that much is asked for before
// there is anything to be ended. Throws std::bad_alloc.
static void check_memory(size_t values) {
    volatile char *whole = new char[values * BYTES_PER_VALUE]; // volatile: or it would not be asked for at all
    *whole = 0;
    delete[] whole;
}

json parse(const std::string &text) {
    if (text.empty()) {
        return json::object();
    }
    check_memory(check_depth(text));
    json object = json::parse(text, nullptr, false);
    if (object.is_discarded()) {
        fail(CODE_JSON, "the text of %zu bytes is not JSON", text.size());
    }
    if (!object.is_object()) {
        fail(CODE_JSON, "the text is a JSON %s, not an object", object.type_name());
    }
    return object;
}

std::string shown(const json &value) {
    std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    if (text.size() > 60) {
        text.resize(57);
        text += "...";
    }
    return text;
}

namespace {

[[noreturn]] void fail_value(const char *key, const json &found, const std::string &expected) {
    fail(CODE_ARGUMENT, "%s is %s, not %s", key, shown(found).c_str(), expected.c_str());
}

const json &need(const json &object, const char *key, const std::string &expected) {
    const auto found = object.find(key);
    if (found == object.end()) {
        fail(CODE_ARGUMENT, "%s is missing, expected %s", key, expected.c_str());
    }
    return *found;
}

const char *const a_flag = "true or false";

bool to_flag(const char *key, const json &value) {
    if (!value.is_boolean()) {
        fail_value(key, value, a_flag);
    }
    return value.get<bool>();
}

std::string a_number(uint64_t most) {
    return "an integer from 0 to " + std::to_string(most);
}

uint64_t to_number(const char *key, const json &value, uint64_t most) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > most) {
        fail_value(key, value, a_number(most));
    }
    return value.get<uint64_t>();
}

int digit(char c) { // -1: none
    const char *const digits = "0123456789abcdefABCDEF";
    const char *found = c ? strchr(digits, c) : nullptr;
    const int at = found ? (int)(found - digits) : -1;
    return at < 16 ? at : at - 6;
}

} // namespace

bool flag(const json &object, const char *key, bool otherwise) {
    const auto found = object.find(key);
    return found == object.end() ? otherwise : to_flag(key, *found);
}

uint64_t number(const json &object, const char *key, uint64_t otherwise, uint64_t most) {
    const auto found = object.find(key);
    return found == object.end() ? otherwise : to_number(key, *found, most);
}

float real(const json &object, const char *key, float otherwise, float least, float most) {
    const auto found = object.find(key);
    if (found == object.end()) {
        return otherwise;
    }
    const double value = found->is_number() ? found->get<double>() : (double)most + 1;
    if (!(value >= (double)least && value <= (double)most)) {
        char expected[80];
        snprintf(expected, sizeof(expected), "a number from %g to %g", (double)least, (double)most);
        fail_value(key, *found, expected);
    }
    return (float)value;
}

bool need_flag(const json &object, const char *key) {
    return to_flag(key, need(object, key, a_flag));
}

uint64_t need_number(const json &object, const char *key, uint64_t most) {
    return to_number(key, need(object, key, a_number(most)), most);
}

std::string need_text(const json &object, const char *key) {
    const json &value = need(object, key, "a string");
    if (!value.is_string()) {
        fail_value(key, value, "a string");
    }
    return value.get<std::string>();
}

void need_hex(const json &object, const char *key, uint8_t *bytes, size_t size) {
    const std::string expected = std::to_string(2 * size) + " hexadecimal digits";
    const json &value = need(object, key, expected);
    const std::string *text = value.get_ptr<const json::string_t *>();
    bool good = text && text->size() == 2 * size;
    for (size_t i = 0; good && i < size; i++) {
        const int high = digit((*text)[2 * i]), low = digit((*text)[2 * i + 1]);
        good = high >= 0 && low >= 0;
        bytes[i] = good ? (uint8_t)(high << 4 | low) : 0;
    }
    if (!good) {
        fail_value(key, value, expected);
    }
}

} // namespace worker
