#version 450

layout(local_size_x = 64) in;

layout(set = 0, binding = 0) buffer Words {
    uint at[];
} words;

// Sixteen steps of a linear congruential generator from each word.
void main() {
    uint index = gl_GlobalInvocationID.x;
    uint value = words.at[index];
    for (uint step = 0u; step < 16u; step += 1u) {
        value = value * 747796405u + 2891336453u;
    }
    words.at[index] = value ^ (value >> 15u);
}
