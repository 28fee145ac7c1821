#version 450

layout(push_constant) uniform Draw {
    vec4 corners;
    vec4 colour;
    float depth;
} draw;

layout(location = 0) out vec4 colour;

void main() {
    colour = draw.colour;
}
