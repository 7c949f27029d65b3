// Whether a rule of placement applies. Each does, but in a test build that takes rules out to see
// what they are worth: csrc/testing/ablate.py.
#pragma once

namespace cgp {

#ifdef CGP_RULE_SWITCHES
bool On(const char* rule);
#else
constexpr bool On(const char*) { return true; }
#endif

}  // namespace cgp
