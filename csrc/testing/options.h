// The command line of a program: flags, and options with a number.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace cgp {

struct Option {
  std::string_view name;                 // with its dashes
  std::variant<bool*, uint64_t*> value;  // is set if it is named
};

// Returns the arguments that are no options; nothing if an option is unknown or lacks its number.
inline std::optional<std::vector<std::string>> ParseOptions(int count, char** arguments,
                                                            std::initializer_list<Option> options) {
  std::vector<std::string> others;
  for (int i = 1; i < count; ++i) {
    const std::string_view argument = arguments[i];
    const auto* const option = std::ranges::find(options, argument, &Option::name);
    if (option == options.end()) {
      if (argument.starts_with("--")) return std::nullopt;
      others.emplace_back(argument);
    } else if (bool* const* const flag = std::get_if<bool*>(&option->value)) {
      **flag = true;
    } else {
      const std::string_view text = ++i < count ? arguments[i] : "";
      const char* const end = text.data() + text.size();
      if (text.empty() ||
          std::from_chars(text.data(), end, *std::get<uint64_t*>(option->value)).ptr != end) {
        return std::nullopt;
      }
    }
  }
  return others;
}

}  // namespace cgp
